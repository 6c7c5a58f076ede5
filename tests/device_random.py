"""uniforms of device arrays against their host twin, and Philox's known answers on a device."""

from functools import lru_cache

import numpy as np
from numba import cuda

from gpu import ACCEPT, ACCEPT_BLOCK, DRAW, PROPOSAL, uniforms
from gpu.random.device import philox
from tests.test_gpu_random import KNOWN


def check_uniforms(up, down, batch=3, width=5, seed=0):
    """float64 bit for bit the host's; positions around each end of 32 bits."""
    rng = np.random.default_rng(seed)
    seeds = rng.integers(0, 2**64, batch, np.uint64)
    positions = rng.choice([0, 2**32 - 3, 2**31 - 1, 2**62], batch) + rng.integers(0, 3, batch)
    for purpose in (ACCEPT, DRAW, PROPOSAL, ACCEPT_BLOCK):
        want = uniforms(seeds, positions, width, purpose)
        out = up(np.zeros((batch, width)))
        assert uniforms(up(seeds), up(positions), width, purpose, out=out) is out
        np.testing.assert_array_equal(down(out), want)
        np.testing.assert_array_equal(down(uniforms(up(seeds), up(positions), width, purpose)), want)


@lru_cache
def _words_kernel():
    @cuda.jit
    def words(counters, keys, out):
        i = cuda.threadIdx.x
        c, k = counters[i], keys[i]
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = philox(c[0], c[1], c[2], c[3], k[0], k[1])

    return words


def check_known_answers(up, down):
    """Philox4x32-10 as Salmon et al. published it."""
    counters = up(np.array([counter for counter, _, _ in KNOWN], np.uint32))
    keys = up(np.array([key for _, key, _ in KNOWN], np.uint32))
    out = up(np.zeros((len(KNOWN), 4), np.uint32))
    _words_kernel()[1, len(KNOWN)](counters, keys, out)
    got = [" ".join(f"{word:08x}" for word in words) for words in down(out).tolist()]
    assert got == [want for _, _, want in KNOWN]


def check_arguments(up):
    """Yields what must be refused: a call, and what its message matches."""
    seeds, positions = up(np.zeros(2, np.uint64)), up(np.zeros(2, np.int64))
    yield lambda: uniforms(seeds, np.zeros(2, np.int64), 1, DRAW), r"positions=int64\[2\], expected a contiguous CuPy"
    yield lambda: uniforms(up(np.zeros(2, np.int64)), positions, 1, DRAW), r"seeds=int64\[2\], expected .* uint64\[2\]"
    yield lambda: uniforms(seeds, positions, -1, DRAW), "width=-1, expected at least 0"
    yield lambda: uniforms(seeds, positions, 3, DRAW, out=up(np.zeros((2, 2)))), r"out=float64\[2, 2\], expected"
