"""Philox, uniforms and derived seeds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu import ACCEPT, ACCEPT_BLOCK, DRAW, PROPOSAL, philox_4x32, sample_seeds, uniforms
from tests import naive
from tests.strategies import fuzz

word = st.integers(0, 2**32 - 1)

KNOWN = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def test_known_answers():
    counters = np.array([counter for counter, _, _ in KNOWN], np.uint32)
    keys = np.array([key for _, key, _ in KNOWN], np.uint32)
    got = philox_4x32(counters, keys)
    for words, (counter, key, want) in zip(got, KNOWN, strict=True):
        assert " ".join(f"{value:08x}" for value in words) == want
        assert naive.philox(counter, key) == words.tolist()


@fuzz
@given(counter=st.lists(word, min_size=4, max_size=4), key=st.lists(word, min_size=2, max_size=2))
def test_philox_is_the_oracles(counter, key):
    assert philox_4x32(np.array(counter, np.uint32), np.array(key, np.uint32)).tolist() == naive.philox(counter, key)


@fuzz
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.one_of(st.integers(0, 2**62), st.integers(2**32 - 3, 2**32 + 3)),
    width=st.integers(0, 5),
    purpose=st.sampled_from([ACCEPT, DRAW, PROPOSAL, ACCEPT_BLOCK]),
)
def test_uniforms_depend_on_seed_and_position_only(seed, position, width, purpose):
    want = [naive.uniform(seed, position + i, purpose) for i in range(width)]
    if purpose == ACCEPT_BLOCK:  # of one position
        want = [naive.uniform(seed, position, purpose, i) for i in range(width)]
    seeds, positions = np.array([7, seed], np.uint64), np.array([0, position], np.int64)
    assert uniforms(seeds, positions, width, purpose)[1].tolist() == want
    assert uniforms(seeds[1:], positions[1:], width, purpose)[0].tolist() == want


def test_uniforms_are_uniform():
    u = uniforms(np.arange(1000, dtype=np.uint64), np.zeros(1000, np.int64), 100, DRAW)
    assert u.min() > 0
    assert u.max() < 1
    counts = np.histogram(u, 64, (0, 1))[0]
    assert ((counts - u.size / 64) ** 2 / (u.size / 64)).sum() < 118  # chi-square, 63 degrees: 3e-5 false alarms


def test_sample_seeds():
    assert sample_seeds(5, 1) == [5]
    seeds = {seed for base in (0, 5, 2**64 - 1) for seed in sample_seeds(base, 100)}
    assert len(seeds) == 300
    assert all(isinstance(seed, int) and 0 <= seed < 2**64 for seed in seeds)
    for base in (5, 2**40 + 7):
        words = naive.philox([2, 0, 3, 0], [base & 0xFFFFFFFF, base >> 32])
        assert sample_seeds(base, 3)[2] == words[0] | words[1] << 32
