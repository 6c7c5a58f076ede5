"""Masks that are prepared once a forward, as a GPU has them: the same attention."""

import pytest
import torch

from model_loaders.layers import attention
from model_loaders.layers.attention import grouped_sdpa, packed_sdpa, prepared_mask
from tests import pipes


def inputs(width, heads=6, kv_heads=2, length=64, batch=3):
    torch.manual_seed(width)
    query = torch.randn(batch, heads, width, 8)
    key, value = torch.randn(2, batch, kv_heads, length, 8)
    positions = torch.arange(width) + torch.tensor([[0], [17], [40]])
    return query, key, value, (torch.arange(length) <= positions[:, :, None])[:, None]


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """Heads are packed however few they are."""
    monkeypatch.setattr(attention, "_FEWEST_HEADS", 0)


@pytest.mark.parametrize("width", [1, 2, 8, 64, 65])
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_an_attention_sees_what_the_boolean_mask_shows(width, kv_heads):
    if width > 24:
        query, key, value, mask = inputs(width, kv_heads=kv_heads, length=128)
    else:
        query, key, value, mask = inputs(width, kv_heads=kv_heads)
    want, _ = grouped_sdpa(torch.nn.Module(), query, key, value, mask)
    prepared = prepared_mask(mask, 6, kv_heads, torch.float32)
    packs = kv_heads == 2 and 1 < width <= 64
    assert prepared.shape[2] == width * (3 if packs else 1)
    got = (
        packed_sdpa(query, key, value, prepared)
        if packs
        else grouped_sdpa(torch.nn.Module(), query, key, value, prepared)[0]
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_queries_of_another_precision():
    query, key, value, mask = inputs(5, kv_heads=6)
    prepared = prepared_mask(mask, 6, 6, torch.bfloat16)
    got, _ = grouped_sdpa(torch.nn.Module(), query, key, value, prepared)
    torch.testing.assert_close(got, grouped_sdpa(torch.nn.Module(), query, key, value, mask)[0])


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("width", [1, 5, 70])
def test_a_whole_forward_as_a_gpu_runs_it(arch, width, monkeypatch):
    """Masks prepared and heads packed by the same conditions, through transformers' own mask handling."""
    monkeypatch.setattr("model_loaders.targets.target.has_packed", lambda model: False)  # layers that look attention up
    target = pipes.load_target(pipes.target_folder(arch=arch, num_heads=4, num_kv_heads=2), device="cpu")
    ids = torch.arange(2 * width).reshape(2, width) % 300
    positions = torch.arange(width) + torch.tensor([[0], [3]])
    cache = target.new_cache(2, 128)
    want = target.forward(ids, positions, cache).logits

    def on_a_gpu(module, query, key, value, mask, dropout=0.0, scaling=None, **others):
        if attention.packs_heads(len(query), query.shape[2], query.shape[1], key.shape[1]):
            assert mask.shape[2] == 2 * query.shape[2]
            return packed_sdpa(query, key, value, mask, dropout, scaling), None
        return grouped_sdpa(module, query, key, value, mask, dropout, scaling, **others)

    monkeypatch.setitem(attention.ALL_ATTENTION_FUNCTIONS, attention.ATTENTION, on_a_gpu)
    target._masks.packs_heads = True
    torch.testing.assert_close(target.forward(ids, positions, cache).logits, want, rtol=1e-4, atol=1e-4)
    last = target.forward(ids, positions, cache, last_only=torch.tensor([width // 2])).logits
    torch.testing.assert_close(last, want[:, width // 2 : width // 2 + 1], rtol=1e-4, atol=1e-4)
