"""How many operators a draft's round queues: in a CUDA graph each small one costs about two microseconds."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model_loaders.drafts.backbone import FULL
from tests import test_drafts
from tests.test_dflash import make_draft

# One kernel each on a GPU, where the CPU has several.
_WHOLE = {"rms_norm", "linear", "scaled_dot_product_attention"}
_NO_WORK = {
    "unbind", "split", "split_with_sizes", "detach", "detach_", "aminmax", "_local_scalar_dense", "item",
    "_reorder_linear_weight", "new_empty",
}  # fmt: skip


class Operators(TorchDispatchMode):
    """Names what is dispatched, but for views and what only the host's checks need."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        implicit = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
        if implicit and name not in _WHOLE:
            with self:
                return operator.decompose(*args, **(kwargs or {}))
        if not operator.is_view and name not in _NO_WORK:
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


def operators(layers: int) -> tuple[list[str], list[str]]:
    """Of an extend and of the hidden states of a block."""
    draft = make_draft(layer_types=(FULL,) * layers)
    cache = draft.new_cache(3, 64)
    cache.reserve()
    starts = torch.tensor([7, 5, 9])
    features, positions = torch.randn(3, 4, 72), starts[:, None] + torch.arange(4)
    with Operators() as extending:
        draft.extend(features, positions, cache, kv_length=64)
    with Operators() as proposing:
        draft.hidden(torch.tensor([3, 4, 5]), starts, cache, kv_length=64)
    return extending.names, proposing.names


@pytest.mark.parametrize(("kind", "most", "draws"), [("dflash", 2, 1), ("dspark vanilla", 20, 4), ("dflash2", 29, 3)])
def test_operators_of_a_drawn_proposal(kind, most, draws, tmp_path):
    """Behind the hidden states; a draw is two launches of `gpu.draw_drafts`, or four, and no operator."""
    draft = test_drafts.load(tmp_path, kind)
    hidden, calls = torch.randn(3, draft.num_drafts, test_drafts.WIDTH), []
    drawn = torch.ones(3, draft.num_drafts, dtype=torch.int64)

    def draw(logits, k):
        calls.append(k)
        return drawn[:, k : k + logits.shape[1]]

    with torch.inference_mode(), Operators() as proposing:
        draft.propose_after(hidden, torch.tensor([3, 4, 5]), draw)
    assert len(calls) == draws
    assert len(proposing.names) <= most, proposing.names


def test_operators_of_a_round():
    extend, propose = operators(2)
    assert len(extend) <= 16, extend
    assert len(propose) <= 50, propose
    assert sum(name in ("clone", "copy_", "cat", "repeat", "contiguous") for name in propose) <= 4, propose


def test_a_layer_more_costs_nothing_to_extend():
    extend, propose = operators(2)
    more_extend, more_propose = operators(3)
    assert more_extend == extend
    assert len(more_propose) - len(propose) <= 15
