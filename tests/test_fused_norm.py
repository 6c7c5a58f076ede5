"""Norms that one kernel computes: which modules are, and that they compute the same."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from model_loaders.layers.fused_norm import FusedNorm, fuse_norms
from tests import pipes


class Scaled(nn.Module):
    """Almost one: eps outside the root."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-3

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_is_known_by_what_it_computes(dtype):
    torch.manual_seed(0)
    kinds = {"llama": LlamaRMSNorm(16), "qwen": Qwen3RMSNorm(16), "gemma": GemmaRMSNorm(16), "layer": nn.LayerNorm(16)}
    model = nn.ModuleDict({**kinds, "scaled": Scaled(), "linear": nn.Linear(16, 16)}).to(dtype)
    for name in ("llama", "qwen"):
        nn.init.normal_(model[name].weight)
    x = torch.randn(3, 5, 16, dtype=dtype)
    before, names = {name: module(x) for name, module in model.items()}, list(model.state_dict())
    assert fuse_norms(model) == 2
    assert [name for name, module in model.items() if isinstance(module, FusedNorm)] == ["llama", "qwen"]
    assert list(model.state_dict()) == names
    for name, module in model.items():
        torch.testing.assert_close(module(x), before[name])


def test_a_whole_model():
    """Every norm of a tiny target; its logits stay what they were, and new weights reach them."""
    target = pipes.load_target(pipes.target_folder(arch="qwen3"), device="cpu")
    ids = torch.arange(12)[None]
    want = target.model(input_ids=ids, use_cache=False).logits
    assert fuse_norms(target.model) == 4 * 3 + 1
    torch.testing.assert_close(target.model(input_ids=ids, use_cache=False).logits, want, rtol=1e-5, atol=1e-5)
    name = next(name for name in target.model.state_dict() if name.endswith("input_layernorm.weight"))
    target.load_weights({name: 2 * target.model.state_dict()[name]})
    assert not torch.allclose(target.model(input_ids=ids, use_cache=False).logits, want, atol=1e-3)
