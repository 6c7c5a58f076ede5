"""A request's records: chunk by chunk, cut and taken out again, what was put in."""

import weakref
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.results.chunk import Chunk, Records


def chunk_of(length, size, start):
    """Tokens start, start + 1, ..., each with a mask of `size` entries and two of the largest log-probabilities."""
    tokens = np.arange(start, start + length, dtype=np.int32)
    entries = np.repeat(tokens, size)
    return Chunk(
        tokens, -tokens.astype(np.float32), np.full(length, size), entries, entries.astype(np.float32),
        np.stack([tokens, tokens + 1], axis=1), np.stack([tokens, tokens], axis=1).astype(np.float32),
    )  # fmt: skip


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    size=st.sampled_from([0, 1, 3, 2000]),
    cuts=st.lists(st.integers(0, 60), max_size=3),
)
def test_what_was_put_in_comes_out(lengths, size, cuts):
    records, ends, handed_out = Records(), [0], []
    for i, length in enumerate(lengths):
        records.append(chunk_of(length, size, ends[-1]))
        ends.append(ends[-1] + length)
        if i in cuts:  # the end of an earlier chunk
            handed_out.append((records.whole(masks=True, top=2), ends[-1]))
            ends = ends[: len(ends) // 2 + 1]
            records.cut(ends[-1])
    handed_out += [(records.whole(masks=True, top=2), ends[-1]) for _ in range(2)]
    for found, length in handed_out:
        assert_same(found, chunk_of(length, size, 0))


def assert_same(found, want):
    for one in fields(Chunk):
        if one.name != "audit":
            np.testing.assert_array_equal(getattr(found, one.name), getattr(want, one.name), one.name)
            assert getattr(found, one.name).dtype == getattr(want, one.name).dtype


def test_records_keep_nothing_of_what_they_took_in_alive():
    chunk = chunk_of(3, 2, 0)
    kept = [weakref.ref(getattr(chunk, one.name)) for one in fields(Chunk) if one.name != "audit"]
    records = Records()
    records.append(chunk)
    del chunk
    assert [array() for array in kept] == [None] * 7
    assert_same(records.whole(masks=True, top=2), chunk_of(3, 2, 0))


def test_a_chunk_that_fits_in_part_is_forgotten_whole():
    """As where memory runs out amid it: the round is undone, and every column is cut to the same token."""
    records, odd = Records(), chunk_of(2, 3, 5)
    records.append(chunk_of(5, 3, 0))
    odd.mask_logprobs = odd.mask_logprobs.repeat(2)[::2]
    with pytest.raises(TypeError, match="bytearray"):
        records.append(odd)
    records.cut(5)
    records.append(chunk_of(2, 3, 5))
    assert_same(records.whole(masks=True, top=2), chunk_of(7, 3, 0))


def test_without_a_chunk_there_is_an_empty_one():
    empty = Records().whole(masks=True, top=3)
    assert len(empty) == 0
    assert empty.mask_ids.size == empty.mask_sizes.size == 0
    assert empty.top_ids.shape == (0, 3)
    assert Records().whole(masks=False, top=0).mask_ids is None
    records = Records()
    records.cut(0)
    assert len(records.whole(masks=False, top=0)) == 0
