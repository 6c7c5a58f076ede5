"""prompt_lookup of device arrays against its host twin: cases for the simulator and for a device."""

import numpy as np

from gpu import prompt_lookup


def random_contexts(rng, batch, longest, alphabet):
    """token_ids int32 [B, L] of few different tokens, and lengths int32 [B] from 0 to L."""
    tokens = rng.integers(0, alphabet, (batch, longest)).astype(np.int32)
    return tokens, rng.integers(0, longest + 1, batch).astype(np.int32)


def check(up, down, seed, batch=3, longest=40, alphabet=3, num_drafts=4, max_ngram=3, min_ngram=1):
    tokens, lengths = random_contexts(np.random.default_rng(seed), batch, longest, alphabet)
    options = {"max_ngram": max_ngram, "min_ngram": min_ngram}
    want = prompt_lookup(tokens, lengths, num_drafts, **options)
    got = prompt_lookup(up(tokens), up(lengths), num_drafts, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(down(a), b)
        assert down(a).dtype == b.dtype
    out = tuple(up(np.full(array.shape, 7, np.int32)) for array in want)
    assert prompt_lookup(up(tokens), up(lengths), num_drafts, **options, out=out)[0] is out[0]
    for a, b in zip(out, want, strict=True):
        np.testing.assert_array_equal(down(a), b)


CASES = {
    "few tokens": {},
    "one token": {"alphabet": 1, "max_ngram": 9},
    "hardly a match": {"alphabet": 30, "min_ngram": 2},
    "more than a block": {"batch": 2, "longest": 700, "alphabet": 5, "max_ngram": 5},
    "many drafts": {"num_drafts": 100},
    "no drafts": {"num_drafts": 0},
    "no requests": {"batch": 0},
    "nothing yet": {"longest": 0},
}


def check_case(up, down, name):
    check(up, down, sorted(CASES).index(name), **CASES[name])


def check_lengths_out_of_range(up, down):
    """Lengths on a device are cut to what is there."""
    tokens = np.array([[1, 2, 1, 2], [1, 2, 1, 2]], np.int32)
    drafts, counts = prompt_lookup(up(tokens), up(np.array([9, -3], np.int32)), 3, max_ngram=2)
    assert down(drafts).tolist() == [[1, 2, 1], [0, 0, 0]]
    assert down(counts).tolist() == [3, 0]


def check_arguments(up):
    """Yields what must be refused: a call, and what its message matches."""
    tokens, lengths = up(np.zeros((2, 3), np.int32)), up(np.zeros(2, np.int32))

    def call(tokens=tokens, lengths=lengths, num_drafts=2, **options):
        return lambda: prompt_lookup(tokens, lengths, num_drafts, **({"max_ngram": 2} | options))

    yield call(up(np.zeros((2, 3)))), r"token_ids=float64\[2, 3\], expected .* int32\[2, 3\]"
    yield call(up(np.zeros(3, np.int32))), r"token_ids=.*3.*, expected a .* int32 \[B, L\]"
    yield call(lengths=up(np.zeros(3, np.int32))), r"lengths=int32\[3\], expected .* int32\[2\]"
    yield (
        call(out=(up(np.zeros((2, 2), np.int32)), up(np.zeros(3, np.int32)))),
        r"out\[1\]=int32\[3\], expected .* int32\[2\]",
    )
    yield call(num_drafts=-1), "num_drafts=-1, expected at least 0"
    yield call(min_ngram=3), "min_ngram=3, max_ngram=2, expected 1 <= min_ngram <= max_ngram"
    yield call(min_ngram=0), "min_ngram=0, max_ngram=2, expected 1 <= min_ngram <= max_ngram"
