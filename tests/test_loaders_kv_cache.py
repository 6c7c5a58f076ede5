"""RowCache: rows of their own lengths, against plain tensors."""

import pytest
import torch

from model_loaders.kv_cache import RowCache

LAYERS, HEADS, DIM, VALUE_DIM = 2, 3, 4, 5


def make_cache(num_slots=5, max_length=200, **other):
    sizes = {"value_head_dim": VALUE_DIM, "num_slots": num_slots, "max_length": max_length} | other
    return RowCache(LAYERS, HEADS, DIM, dtype=torch.float32, device="cpu", **sizes)


def entries(rows, width, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, HEADS, width, DIM, generator=g),
            torch.randn(rows, HEADS, width, VALUE_DIM, generator=g))  # fmt: skip


@pytest.mark.parametrize("slots", [None, [0, 1, 2], [2, 3, 4], [4, 0, 2], torch.tensor([3, 1, 0])])
def test_write_then_read(slots):
    cache = make_cache()
    positions = torch.tensor([[0, 1], [7, 3], [90, 91]])
    keys, values = entries(3, 2)
    got_keys, got_values = cache.write(1, keys, values, positions, slots)
    assert got_keys.shape == (3, HEADS, 92, DIM)
    assert got_values.shape == (3, HEADS, 92, VALUE_DIM)
    for row in range(3):
        for i, position in enumerate(positions[row].tolist()):
            assert torch.equal(got_keys[row, :, position], keys[row, :, i])
            assert torch.equal(got_values[row, :, position], values[row, :, i])
    assert int((got_keys != 0).any(-1).any(1).sum()) == 6  # nothing else was written
    other_layer, _ = cache.write(0, *entries(3, 2, seed=1), positions, slots)
    assert not torch.equal(other_layer, got_keys)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("slots", [None, [2, 3, 4], [4, 0, 2]])
def test_all_layers_at_once(together, slots):
    """As layer by layer, from transposed entries, through growth; and into a cache of the other kind."""
    cache, other = make_cache(together=together), make_cache(together=not together)
    for seed, positions in enumerate(([[0, 1], [7, 3], [9, 4]], [[70, 71], [60, 61], [190, 3]])):
        keys, values = (
            torch.stack(layers) for layers in zip(entries(3, 2, seed), entries(3, 2, 9 - seed), strict=True)
        )
        cache.begin(torch.tensor(positions), slots)
        cache.write_layers(*(part.transpose(2, 3).contiguous().transpose(2, 3) for part in (keys, values)))
        other.begin(torch.tensor(positions), slots)
        for layer in range(LAYERS):
            other.write(layer, keys[layer], values[layer])
    assert cache.allocated == other.allocated
    assert cache.memory_bytes() == other.memory_bytes()
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
    row = 2 if slots is None else slots[2]
    other.release(row)
    other.restore(row, cache.snapshot(row, 191))
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, other.layers, strict=True))
    with pytest.raises(ValueError, match=r"keys=\[2, 3, 3, 1, 4\], expected \[2, 3, 3, 2, 4\]"):
        cache.write_layers(keys[..., :1, :], values)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("slots", [None, [4, 0, 2]])
@pytest.mark.parametrize("kept", [None, [0, 3, 5]])
def test_keys_and_values_in_one(together, slots, kept):
    """As by two writes, from transposed entries, through growth."""
    cache, other = (make_cache(value_head_dim=DIM, together=together) for _ in range(2))
    kept = None if kept is None else torch.tensor(kept)
    for seed, positions in enumerate(([[0, 1], [7, 3], [9, 4]], [[70, 71], [60, 61], [190, 3]])):
        rows, width = (3, 2) if kept is None else (1, len(kept))
        both = torch.randn(rows, width, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)
        for one in (cache, other):
            one.begin(torch.tensor(positions), slots, kept=kept)
        for layer in range(LAYERS):
            got, want = cache.write_both(layer, both), other.layers[layer].update(*both.split(HEADS, 1))
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_layers_together_are_one_storage():
    cache = make_cache(together=True)
    cache.reserve()
    assert len({layer.keys.untyped_storage().data_ptr() for layer in cache.layers}) == 1


def test_neighbouring_slots_are_views():
    cache = make_cache()
    keys, _ = cache.write(0, *entries(2, 1), torch.tensor([[3], [9]]), [1, 2])
    assert keys.untyped_storage().data_ptr() == cache.layers[0].keys.untyped_storage().data_ptr()


def test_growth_keeps_entries_and_is_on_demand():
    cache = make_cache(num_slots=8, max_length=1000)
    assert cache.memory_bytes() == 0
    keys, values = entries(1, 3)
    cache.write(0, keys, values, torch.tensor([[0, 1, 2]]))
    small = cache.memory_bytes()
    cache.write(0, *entries(1, 1, seed=2), torch.tensor([[700]]), [7])
    assert 0 < small < cache.memory_bytes()
    slots, length = cache.allocated
    assert (slots, length) == (8, 701)
    assert cache.memory_bytes() == LAYERS * slots * length * HEADS * (DIM + VALUE_DIM) * 4
    assert torch.equal(cache.layers[0].keys[0, :, :3], keys[0])
    assert torch.equal(cache.layers[0].values[0, :, :3], values[0])


def test_reserve_fixes_the_addresses():
    cache = make_cache()
    cache.reserve()
    address = cache.layers[0].keys.data_ptr()
    cache.write(0, *entries(1, 1), torch.tensor([[199]]), [4])
    assert cache.layers[0].keys.data_ptr() == address
    assert cache.allocated == (5, 200)


def test_copy_snapshot_restore():
    cache, other = make_cache(), make_cache(num_slots=9)
    for layer in range(LAYERS):
        cache.write(layer, *entries(1, 6, seed=layer), torch.arange(6)[None], [3])
    kept = cache.snapshot(3, 4)
    assert kept.memory_bytes() == LAYERS * 4 * HEADS * (DIM + VALUE_DIM) * 4
    cache.copy_row(3, 0, 6)
    cache.release(3)
    other.restore(8, kept)
    for layer in range(LAYERS):
        keys, values = entries(1, 6, seed=layer)
        assert torch.equal(cache.layers[layer].keys[0, :, :6], keys[0])
        assert torch.equal(cache.layers[layer].values[0, :, :6], values[0])
        assert torch.equal(other.layers[layer].keys[8, :, :4], keys[0, :, :4])
        assert not cache.layers[layer].keys[3].any()  # released; the snapshot isn't a view


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: RowCache(0, 1, 1, num_slots=1, max_length=1, dtype=torch.float32, device="cpu"),
         "num_layers=0, expected at least 1"),
        (lambda c: c.begin(torch.tensor([0])), "positions=torch.int64 [1], expected int64 [b, w]"),
        (lambda c: c.begin(torch.tensor([[-1]])), "positions=-1, expected at least 0"),
        (lambda c: c.begin(torch.tensor([[200]])), "kv_length=201, expected at most max_length=200"),
        (lambda c: c.begin(torch.tensor([[7]]), kv_length=7), "kv_length=7, expected more than"),
        (lambda c: c.begin(torch.zeros(2, 1, dtype=torch.int64), [1, 1]), "slots=[1, 1], expected 2"),
        (lambda c: c.begin(torch.zeros(1, 1, dtype=torch.int64), [5]), "slots=[5], expected each in 0..4"),
        (lambda c: c.begin(torch.zeros(6, 1, dtype=torch.int64)), "positions=6 rows, expected at most"),
        (lambda c: c.write(0, *entries(2, 1), torch.zeros(1, 1, dtype=torch.int64)), "keys=[2, 3, 1, 4],"),
        (lambda c: c.snapshot(0, 3), "length=3, expected 0..0"),
        (lambda c: c.copy_row(0, 9, 0), "dst=9, expected 0..4"),
        (lambda c: c.release(-1), "slot=-1, expected 0..4"),
        (lambda c: c.reserve(6), "num_slots=6, expected 1 to 5"),
    ],
)  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked below
        call(make_cache())
    assert message in str(error.value)


def test_no_step_yet():
    with pytest.raises(RuntimeError, match="call begin"):
        make_cache().write(0, *entries(1, 1))
