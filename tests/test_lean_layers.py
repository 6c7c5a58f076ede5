"""Decoder layers with fewer kernels: which are, that they compute the same, and how many operators they queue."""

import copy
from unittest.mock import patch

import pytest
import torch

import model_loaders.targets.target
from model_loaders.layers.fused_norm import fuse_norms
from model_loaders.layers.lean_layer import lean_layers
from model_loaders.layers.packed_linear import has_packed
from model_loaders.layers.taps import LayerTaps
from pipeline.running.operators import KernelOperators
from tests import pipes
from tests.test_draft_operators import Operators

KINDS = {
    "llama": {"arch": "llama"},
    "biased": {"arch": "qwen2"},
    "normed": {"arch": "qwen3"},
    "mistral": {"arch": "mistral"},
    "mlp bias": {"arch": "llama", "mlp_bias": True, "attention_bias": True},
}


def loaded(**shape):
    """A target with the linear layers of a GPU's, and its own decoder layers."""
    with patch("model_loaders.targets.loading.pack_linears", lambda model: False):
        target = pipes.load_target(pipes.target_folder(**shape), device="cpu")
    assert target._lean is None
    return target


def packed(lean, **shape):
    """A target with the linear layers of a CPU's."""
    with patch("model_loaders.targets.target.has_packed", lambda model: lean and has_packed(model)):
        target = pipes.load_target(pipes.target_folder(**shape), device="cpu")
    if not has_packed(target.model):
        pytest.skip("torch has no oneDNN here")
    assert (target._lean is not None) == lean
    return target


def forward(target, ids, lengths=None, start=0):
    """Two blocks of all rows, one behind the other: the second's logits and features."""
    batch, width = ids.shape
    cache = target.new_cache(batch, 192)
    for first in (start, start + width):
        positions = (first + torch.arange(width)).expand(batch, -1).to(ids.device)
        output = target.forward(ids, positions, cache, lengths=lengths)
    return output


@pytest.mark.parametrize("name", KINDS)
def test_the_layers_compute_the_same(name):
    """Logits and tapped layers of narrow, wide and ragged blocks, in the order of a decoding run."""
    torch.manual_seed(0)
    plain, lean = (loaded(**KINDS[name]) for _ in range(2))
    names = list(lean.model.state_dict())
    lean._lean = lean_layers(lean.model, lean.layers)
    assert lean._lean
    assert list(lean.model.state_dict()) == names
    for target in (plain, lean):
        target.set_taps([-1, 0, 2])
    for shape, lengths in (((3, 1), None), ((3, 8), None), ((2, 80), None), ((3, 8), [8, 0, 3])):
        ids = torch.randint(0, 300, shape)
        want, got = forward(plain, ids, lengths), forward(lean, ids, lengths)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(got.features, want.features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_the_layers_compute_the_same_on_kernels(name):
    """Those that a GPU has; here what stands for them on the host."""
    torch.manual_seed(0)
    plain, lean = (loaded(**KINDS[name]) for _ in range(2))
    lean._lean = lean_layers(lean.model, lean.layers)
    for target in (plain, lean):
        target.set_taps([-1, 0, 2])
    lean.use_operators(KernelOperators())
    for shape, lengths in (((3, 1), None), ((2, 80), None), ((3, 8), [8, 0, 3])):
        ids = torch.randint(0, 300, shape)
        want, got = forward(plain, ids, lengths), forward(lean, ids, lengths)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(got.features, want.features, rtol=1e-4, atol=1e-5)


def joined(target):
    """The layers whose products are parts of one."""
    return [part for layer in target.layers for joint in (layer.forward.projections, layer.forward.gates)
            for part in joint.parts]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_packed_layers_compute_the_same_bits(name):
    """On a CPU; and weights are held twice, not three times."""
    torch.manual_seed(0)
    plain, lean = (packed(lean, **KINDS[name]) for lean in (False, True))
    for target in (plain, lean):
        target.set_taps([-1, 0, 2])
    for shape, lengths in (((1, 1), None), ((3, 1), None), ((3, 8), None), ((2, 80), None), ((3, 8), [8, 0, 3])):
        ids = torch.randint(0, 300, shape)
        want, got = forward(plain, ids, lengths), forward(lean, ids, lengths)
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(got.features, want.features, rtol=0, atol=0)
    assert all(part._packed is None for part in joined(lean))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_a_targets_layers_on_a_device(name, monkeypatch):
    """Where packed heads are taken as they lie; blocks of every width that attention treats differently."""
    torch.manual_seed(0)
    folder = pipes.target_folder(**KINDS[name])
    lean = pipes.load_target(folder, device="cuda", dtype="float32")
    monkeypatch.setattr(model_loaders.targets.target, "lean_layers", lambda *_: None)
    plain = pipes.load_target(folder, device="cuda", dtype="float32")
    assert [one._lean is not None for one in (lean, plain)] == [True, False]
    for operators in (None, KernelOperators()):
        lean.use_operators(operators)
        for shape, lengths in (((3, 1), None), ((3, 8), None), ((2, 80), None), ((3, 8), [8, 0, 3])):
            ids = torch.randint(0, 300, shape, device="cuda")
            want, got = forward(plain, ids, lengths), forward(lean, ids, lengths)
            torch.testing.assert_close(got.logits, want.logits, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_new_weights_reach_them():
    target = loaded()
    assert lean_layers(target.model, target.layers)
    ids = torch.arange(6)[None]
    before = forward(target, ids).logits
    other = loaded()
    changed = {name: 1.5 * value for name, value in other.model.state_dict().items() if "layers.1." in name}
    for one in (target, other):
        one.load_weights(changed)
    torch.testing.assert_close(forward(target, ids).logits, forward(other, ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(forward(target, ids).logits, before, atol=1e-3)


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "up_proj"])
def test_a_new_weight_reaches_a_packed_product(part):
    plain, lean = (packed(lean) for lean in (False, True))
    ids = torch.arange(6)[None]
    before = forward(lean, ids).logits
    changed = {name: 1.5 * value for name, value in plain.model.state_dict().items() if part in name}
    for one in (plain, lean):
        one.load_weights(changed)
    assert torch.equal(forward(lean, ids).logits, forward(plain, ids).logits)
    assert not torch.equal(forward(lean, ids).logits, before)


def test_whoever_calls_the_model_itself_gets_its_own_layers():
    """Hidden states that aren't overwritten, gradients, other caches; copies of the model too."""
    plain, lean = (loaded() for _ in range(2))
    assert lean_layers(lean.model, lean.layers)
    ids = torch.arange(6)[None]
    for model in (lean.model, copy.deepcopy(lean.model)):
        want, got = (one(input_ids=ids, output_hidden_states=True) for one in (plain.model, model))
        for expected, found in zip(want.hidden_states, got.hidden_states, strict=True):
            assert torch.equal(expected, found)
    copied = copy.deepcopy(lean)
    assert torch.equal(forward(copied, ids).logits, forward(plain, ids).logits)
    embedded = lean.embed(ids).clone().requires_grad_()
    lean.model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "shape",
    [
        {"arch": "qwen3_moe"},
        {"arch": "gemma"},  # norms of 1 + weight, scaled embeddings: layers of the same parts
        {"arch": "granite", "residual_multiplier": 0.5, "attention_multiplier": 0.35},
        {"arch": "smollm3", "no_rope_layer_interval": 2},
        {"arch": "gpt_neox"},
    ],
    ids=lambda shape: shape["arch"],
)
def test_other_layers_stay(shape):
    """Unless they compute the same after all, as Gemma's do."""
    target = loaded(**shape)
    ids = torch.arange(6)[None]
    want = forward(target, ids).logits
    found = lean_layers(target.model, target.layers)
    assert (found is not None) == (shape["arch"] == "gemma")
    torch.testing.assert_close(forward(target, ids).logits, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kernels", "most"), [(False, 14), (True, 9)])
def test_operators_of_a_layer(kernels, most):
    """In a CUDA graph each small one costs about two microseconds; with kernels, two more than these."""
    counts = []
    for layers in (2, 3):
        target = loaded(num_layers=layers)
        fuse_norms(target.model)
        cache, positions = target.new_cache(2, 64), torch.arange(8).expand(2, -1)
        cache.reserve()
        target._lean = lean_layers(target.model, target.layers)
        target.use_operators(KernelOperators() if kernels else None)
        with Operators() as found:
            target.forward(torch.zeros(2, 8, dtype=torch.int64), positions, cache, kv_length=64)
        counts.append(len(found.names))
    assert counts[1] - counts[0] <= most, found.names[-20:]


def test_taps_copy_what_is_overwritten():
    layer = torch.nn.Identity()
    taps = LayerTaps([layer], [-1, 0], overwritten=True)
    rows = torch.ones(1, 2, 3)
    layer(rows).zero_()
    assert taps.features().sum() == 12
