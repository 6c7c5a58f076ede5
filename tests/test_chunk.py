"""A request's records: chunk by chunk, cut and taken out again, what was put in."""

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.chunk import MOST_CHUNKS, MOST_ENTRIES, Chunk, Records


def chunk_of(length, size, start):
    """Tokens start, start + 1, ..., each with a mask of `size` entries and two of the largest log-probabilities."""
    tokens = np.arange(start, start + length, dtype=np.int32)
    entries = np.repeat(tokens, size)
    return Chunk(
        tokens, -tokens.astype(np.float32), np.full(length, size), entries, entries.astype(np.float32),
        np.stack([tokens, tokens + 1], axis=1), np.stack([tokens, tokens], axis=1).astype(np.float32),
    )  # fmt: skip


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3 * MOST_CHUNKS),
    size=st.sampled_from([0, 1, 3, MOST_ENTRIES // 8]),
    cuts=st.lists(st.integers(0, 3 * MOST_CHUNKS), max_size=3),
)
def test_what_was_put_in_comes_out(lengths, size, cuts):
    records, ends = Records(), [0]
    for i, length in enumerate(lengths):
        records.append(chunk_of(length, size, ends[-1]))
        ends.append(ends[-1] + length)
        if i in cuts:  # the end of an earlier chunk
            ends = ends[: len(ends) // 2 + 1]
            records.cut(ends[-1])
    for _ in range(2):
        found, want = records.whole(masks=True, top=2), chunk_of(ends[-1], size, 0)
        for one in fields(Chunk):
            if one.name != "audit":
                np.testing.assert_array_equal(getattr(found, one.name), getattr(want, one.name), one.name)
    assert len(records._chunks) < MOST_CHUNKS


def test_without_a_chunk_there_is_an_empty_one():
    empty = Records().whole(masks=True, top=3)
    assert len(empty) == 0
    assert empty.mask_ids.size == empty.mask_sizes.size == 0
    assert empty.top_ids.shape == (0, 3)
    assert Records().whole(masks=False, top=0).mask_ids is None


def test_requests_that_start_together_copy_in_different_rounds():
    together = [Records() for _ in range(MOST_CHUNKS)]
    rounds = []
    for i in range(MOST_CHUNKS):
        for number, records in enumerate(together):
            records.append(chunk_of(1, 1, i))
            if not records._chunks:
                rounds.append((i, number))
    assert len({i for i, _ in rounds}) == MOST_CHUNKS
