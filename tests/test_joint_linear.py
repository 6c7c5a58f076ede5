"""Joined projections: the same draft from fewer products, whatever is done with its parameters."""

import copy

import pytest
import torch
from torch.func import functional_call

from model_loaders.drafts import load_draft, save_draft
from model_loaders.layers.joint_linear import JointLinear
from model_loaders.layers.packed_linear import pack_linears
from tests.test_dflash import make_draft

ROWS = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


def parts(bias=True, **other):
    torch.manual_seed(0)
    return [torch.nn.Linear(8, rows, bias=bias, **other).requires_grad_(False) for rows in (6, 2, 3)]


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_joint_product_is_its_parts(bias):
    made = parts(bias)
    before = [part(ROWS) for part in made]
    held = [part.weight for part in made]
    joint = JointLinear.of(made)
    assert joint.usable
    torch.testing.assert_close(joint(ROWS), torch.cat(before, -1))
    torch.testing.assert_close(joint[1:3](ROWS), torch.cat(before[1:], -1))
    assert [part.weight for part in made] == held
    assert {part.weight.untyped_storage().data_ptr() for part in made} == {joint.weight.untyped_storage().data_ptr()}
    made[1].weight.fill_(0.5)
    torch.testing.assert_close(joint[1:2](ROWS), made[1](ROWS))


@torch.no_grad()
def test_other_weights_are_noticed():
    made = parts()
    joint = JointLinear.of(made)
    swapped = {"weight": made[2].weight + 1}
    seen = []
    made[2].register_forward_hook(lambda *_: seen.append((joint.usable, joint[:2].usable)))
    functional_call(made[2], swapped, (ROWS,))
    assert seen == [(False, True)]
    assert joint.usable
    made[0].double()
    assert not joint.usable
    assert joint[1:].usable
    with torch.enable_grad():
        assert not joint[1:].usable


def joined(module):
    return [module._joint] + [part.joint for layer in module.layers for part in (layer.self_attn, layer.mlp)]


def storages(module):
    return {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in module.state_dict().values()}


def proposed(draft, features):
    """Hidden states behind a context that the draft itself extends."""
    cache = draft.new_cache(2, 32)
    draft.extend(features, torch.arange(features.shape[1]).expand(2, -1), cache)
    return draft.hidden(torch.tensor([3, 4]), torch.tensor([7, 5]), cache)


@pytest.mark.parametrize("bias", [False, True])
def test_a_draft_is_joined_and_nothing_is_held_twice(bias):
    draft = make_draft(attention_bias=bias)
    module, features = draft.module, torch.randn(2, 7, 72)
    assert all(joint is not None for joint in joined(module))
    assert sum(storages(module).values()) == sum(w.nbytes for w in module.state_dict().values())
    expected = proposed(draft, features)
    with torch.inference_mode(False), torch.no_grad():  # the same module, unjoined
        apart = type(module)(draft.config)
        apart.load_state_dict(module.state_dict())
    other = copy.copy(draft)
    other.module = apart
    assert joined(apart) == [None] * 5
    torch.testing.assert_close(proposed(other, features), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_joined_draft_follows_its_parameters():
    """Through conversions, new values, and copies, which begin apart."""
    draft, features = make_draft(), torch.randn(2, 7, 72)
    single = proposed(draft, features)
    draft.module.double()
    assert {joint.weight.dtype for joint in joined(draft.module)} == {torch.float64}
    assert all(joint.usable for joint in joined(draft.module))
    assert sum(storages(draft.module).values()) == sum(w.nbytes for w in draft.module.state_dict().values())
    draft.module.float()
    torch.testing.assert_close(proposed(draft, features), single)
    other = copy.copy(draft)
    other.module = copy.deepcopy(draft.module)
    assert joined(other.module) == [None] * 5
    for weight in draft.module.parameters():
        weight.mul_(1.1)
    torch.testing.assert_close(proposed(other, features), single)
    twin = make_draft()
    for weight in twin.module.parameters():
        weight.mul_(1.1)
    torch.testing.assert_close(proposed(draft, features), proposed(twin, features))
    assert not torch.allclose(proposed(draft, features), single)


def test_a_joined_draft_is_stored_and_loaded(tmp_path):
    draft = make_draft()
    save_draft(tmp_path, draft)
    target = draft.target
    target.num_layers, target.hidden_size, target.vocab_size = 5, 24, 61
    target.device, target.dtype = torch.device("cpu"), torch.float32
    loaded = load_draft(tmp_path, target)
    state, expected = loaded.module.state_dict(), draft.module.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_packed_layers_stay_apart():
    """They multiply with copies of their own: joined as well, weights would be held three times."""
    module = make_draft().module
    apart = type(module)(module.config).requires_grad_(False)
    if not pack_linears(apart):
        pytest.skip("torch has no oneDNN here")
    apart.join()
    assert joined(apart) == [None] * 5
