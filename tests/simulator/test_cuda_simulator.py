"""The simulator's warp primitives against plain NumPy, and how it takes kernels that can't work."""

import math
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
from numba import cuda, njit

from tests.cuda_simulator import Deadlock, install

FULL = 0xFFFFFFFF
BLOCKS, THREADS, LANES = 3, 64, 32
RNG_SEED = 20
TYPES = (np.int32, np.int64, np.float32, np.float64)


def values(dtype):
    bits = np.random.default_rng(RNG_SEED).integers(0, 256, (BLOCKS, THREADS, np.dtype(dtype).itemsize), np.uint8)
    if np.issubdtype(dtype, np.floating):
        return (bits[..., 0].astype(dtype) - 100) / 3
    return bits.view(dtype)[..., 0]


def warps(array):
    return array.reshape(BLOCKS, THREADS // LANES, LANES)


def launch(kernel, *args):
    kernel[BLOCKS, THREADS](*args)


@cuda.jit
def shuffles(x, sources, out):
    i, t = cuda.blockIdx.x, cuda.threadIdx.x
    own = x[i, t]
    out[0, i, t] = cuda.shfl_sync(FULL, own, sources[i, t])
    out[1, i, t] = cuda.shfl_up_sync(FULL, own, np.int32(5))
    out[2, i, t] = cuda.shfl_down_sync(FULL, own, 7)
    out[3, i, t] = cuda.shfl_xor_sync(FULL, own, 17)


@pytest.mark.parametrize("dtype", TYPES)
def test_shuffles(dtype):
    x, out = values(dtype), np.empty((4, BLOCKS, THREADS), dtype)
    sources = np.random.default_rng(RNG_SEED + 1).integers(0, LANES, (BLOCKS, THREADS), np.int32)
    launch(shuffles, x, sources, out)
    lane = np.arange(LANES)
    below, above = lane - 5, lane + 7
    indices = (
        warps(sources),
        np.where(below < 0, lane, below),
        np.where(above >= LANES, lane, above),
        lane ^ 17,
    )
    for got, index in zip(out, indices, strict=True):
        index = np.broadcast_to(index, warps(x).shape)
        np.testing.assert_array_equal(warps(got), np.take_along_axis(warps(x), index, 2))


@cuda.jit
def shuffled_type(kinds, out):
    own = np.float32(1) if kinds[0] == 0 else np.int32(1) if kinds[0] == 1 else 1
    got = cuda.shfl_xor_sync(FULL, own, 1)
    out[cuda.threadIdx.x] = got.dtype.num


@pytest.mark.parametrize(("kind", "dtype"), [(0, np.float32), (1, np.int32), (2, np.int64)])
def test_a_shuffle_keeps_the_type(kind, dtype):
    out = np.empty(LANES, np.int64)
    shuffled_type[1, LANES](np.array([kind]), out)
    assert set(out) == {np.dtype(dtype).num}


@cuda.jit
def shuffle_one(x, delta, out):
    out[cuda.threadIdx.x] = cuda.shfl_up_sync(FULL, x[cuda.threadIdx.x], delta)


def test_shuffles_refuse_what_a_device_does():
    with pytest.raises(TypeError, match="shfl_up_sync of uint32, expected one of int32, int64, float32, float64"):
        shuffle_one[1, LANES](np.zeros(LANES, np.uint32), 1, np.zeros(LANES, np.uint32))
    with pytest.raises(ValueError, match="shfl_up_sync by 32, expected 0 to 31"):
        shuffle_one[1, LANES](np.zeros(LANES, np.int32), 32, np.zeros(LANES, np.int32))


@cuda.jit
def votes(x, out):
    i, t = cuda.blockIdx.x, cuda.threadIdx.x
    out[0, i, t] = cuda.ballot_sync(FULL, x[i, t] & 1)
    out[1, i, t] = cuda.any_sync(FULL, x[i, t] > 250)
    out[2, i, t] = cuda.all_sync(-1, x[i, t] < 250)
    out[3, i, t] = cuda.match_any_sync(FULL, x[i, t] >> np.int32(6))
    cuda.syncwarp()
    out[4, i, t] = cuda.laneid
    out[5, i, t] = cuda.lanemask_lt()
    out[6, i, t] = cuda.popc(cuda.ballot_sync(FULL, True))


def test_votes():
    x = np.random.default_rng(RNG_SEED).integers(0, 256, (BLOCKS, THREADS), np.int32)
    out = np.empty((7, BLOCKS, THREADS), np.int64)
    launch(votes, x, out)
    weights = (np.uint32(1) << np.arange(LANES, dtype=np.uint32)).astype(np.uint32)
    w = warps(x)
    ballot = ((w & 1) * weights).sum(2).astype(np.uint32).view(np.int32)
    assert (ballot < 0).any()
    full = np.ones(LANES, np.int64)
    np.testing.assert_array_equal(warps(out[0]), ballot[..., None] * full)
    np.testing.assert_array_equal(warps(out[1]), (w > 250).any(2)[..., None] * full)
    np.testing.assert_array_equal(warps(out[2]), (w < 250).all(2)[..., None] * full)
    same = (w >> 6)[..., None] == (w >> 6)[..., None, :]
    np.testing.assert_array_equal(warps(out[3]), (same * weights).sum(3).astype(np.uint32).view(np.int32))
    np.testing.assert_array_equal(warps(out[4]), np.broadcast_to(np.arange(LANES), w.shape))
    np.testing.assert_array_equal(warps(out[5]), np.broadcast_to(weights.astype(np.int64) - 1, w.shape))
    assert (out[6] == LANES).all()


@cuda.jit(device=True)
def warp_exclusive_sum(value):
    total = value
    delta = 1
    while delta < LANES:
        below = cuda.shfl_up_sync(FULL, total, delta)
        if cuda.laneid >= delta:
            total = np.int32(total + below)
        delta *= 2
    return np.int32(total - value)


@cuda.jit("void(int32[:,::1], int32[:,::1])", launch_bounds=THREADS, max_registers=32, lineinfo=True, fastmath=False)
def scan(x, out):
    out[cuda.blockIdx.x, cuda.threadIdx.x] = warp_exclusive_sum(x[cuda.blockIdx.x, cuda.threadIdx.x])


def test_a_warp_scan_in_a_device_function_wraps_silently(recwarn):
    x, out = values(np.int32), np.empty((BLOCKS, THREADS), np.int32)
    launch(scan, x, out)
    with np.errstate(over="ignore"):
        expected = np.cumsum(warps(x), axis=2, dtype=np.int32) - warps(x)
    np.testing.assert_array_equal(warps(out), expected)
    assert not list(recwarn)


@cuda.jit
def reduce_block(x, out):
    partial, result = cuda.shared.array(2, np.int64), cuda.shared.array(1, np.int64)
    i, t = cuda.blockIdx.x, cuda.threadIdx.x
    total = x[i, t]
    for step in range(5):
        total += cuda.shfl_xor_sync(FULL, total, 1 << step)
    if cuda.laneid == 0:
        partial[t // LANES] = total
    cuda.syncthreads()
    if t == 0:
        result[0] = partial[0] + partial[1]
    cuda.syncthreads()
    out[i, t] = result[0] - partial[0]


def test_a_block_reduction_through_shared_memory():
    x, out = values(np.int64) >> 8, np.empty((BLOCKS, THREADS), np.int64)
    launch(reduce_block, x, out)
    np.testing.assert_array_equal(out, np.broadcast_to(x[:, LANES:].sum(1)[:, None], out.shape))


@cuda.jit
def read_shared(out):
    memory = cuda.shared.array(THREADS, np.int32)
    out[cuda.blockIdx.x, cuda.threadIdx.x] = memory[cuda.threadIdx.x]
    cuda.syncthreads()
    memory[cuda.threadIdx.x] = 0


def test_shared_memory_starts_as_garbage_in_every_block():
    out = np.zeros((BLOCKS, THREADS), np.int32)
    launch(read_shared, out)
    assert out.all()


@cuda.jit
def bits(x, out):
    for i in range(len(x)):
        out[i, 0] = cuda.popc(x[i])
        out[i, 1] = cuda.clz(x[i])
        out[i, 2] = cuda.ffs(x[i])
        out[i, 3] = cuda.brev(x[i])


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_bit_counts(dtype):
    width = np.dtype(dtype).itemsize * 8
    x = np.array([0, 1, 5, 1 << (width - 2), 1 << (width // 2)], dtype)
    x = np.concatenate([x, ~x])
    out = np.empty((len(x), 4), dtype)
    bits[1, 1](x, out)
    for value, (ones, leading, first, reverse) in zip(x, out, strict=True):
        text = format(int(value) % (1 << width), f"0{width}b")
        assert ones == text.count("1")
        assert leading == len(text) - len(text.lstrip("0"))
        assert first == (text[::-1].find("1") + 1)
        assert format(int(reverse) % (1 << width), f"0{width}b") == text[::-1]


@cuda.jit
def fused(x, out):
    for i in range(len(x)):
        out[i] = cuda.fma(x[i, 0], x[i, 1], x[i, 2])


def test_fma_rounds_once():
    rng = np.random.default_rng(RNG_SEED)
    x = rng.standard_normal((2000, 3)).astype(np.float32)
    x[:500, 2] = -x[:500, 0] * x[:500, 1]
    # The exact sum is just below the middle of two floats, and float64 would round it onto the middle.
    x[500] = 2.0**-24 * (1 + 2.0**-15), 1 - 2.0**-15, 1 + 2.0**-23
    out = np.empty(len(x), np.float32)
    fused[1, 1](x, out)
    for (a, b, c), got in zip(x, out, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        error = abs(Fraction(float(got)) - exact)
        for neighbour in (np.nextafter(got, np.float32(math.inf)), np.nextafter(got, np.float32(-math.inf))):
            assert error <= abs(Fraction(float(neighbour)) - exact)


@njit
def key(x):
    return np.int32(np.float32(x).view(np.int32) ^ np.int32(1))


@cuda.jit
def call_njit(x, out):
    i, t = cuda.blockIdx.x, cuda.threadIdx.x
    out[i, t] = np.int32(key(x[i, t])) << np.int32(4)


def test_an_njit_function_is_called_compiled_for_the_cpu():
    x, out = values(np.float32), np.empty((BLOCKS, THREADS), np.int32)
    launch(call_njit, x, out)
    np.testing.assert_array_equal(out, (x.view(np.int32) ^ 1) << 4)


@cuda.jit
def fail_in_a_warp(x):
    if cuda.threadIdx.x == 40:
        raise OSError("its own reason")
    cuda.shfl_sync(FULL, x[0], 0)
    cuda.syncthreads()


@cuda.jit
def return_early(x):
    if cuda.threadIdx.x == 40:
        return
    cuda.syncwarp()


@cuda.jit
def return_last(x):
    if cuda.threadIdx.x == 40:
        time.sleep(0.1)  # the other lanes wait by now
        return
    cuda.syncwarp()


@cuda.jit
def diverge(x):
    if cuda.threadIdx.x == 40:
        cuda.syncthreads()
    else:
        cuda.syncwarp()


@cuda.jit
def mix(x):
    if cuda.threadIdx.x == 40:
        cuda.any_sync(FULL, True)
    else:
        cuda.all_sync(FULL, True)


@cuda.jit
def half_mask(x):
    cuda.syncwarp(0xFFFF)


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [
        (fail_in_a_warp, OSError, r"tid=.40, 0, 0. .*: its own reason"),
        (return_early, Deadlock, "warps .* {1: .'syncwarp'.}"),
        (return_last, Deadlock, "a thread returned while .* {1: .'syncwarp'.}"),
        (diverge, Deadlock, r"\d+ at a block barrier, warps .* {1: .'syncwarp'.}"),
        (mix, Deadlock, "different primitives: all_sync, any_sync"),
        (half_mask, ValueError, "mask=0xffff, expected 0xffffffff"),
    ],
)
def test_a_broken_warp_ends_with_the_reason(kernel, error, message):
    before = threading.active_count()
    with pytest.raises(error, match=message):
        launch(kernel, np.zeros(1, np.int32))
    assert threading.active_count() == before


def test_a_partial_warp_is_refused():
    with pytest.raises(ValueError, match="block size=48, expected a multiple of 32"):
        return_early[1, 48](np.zeros(1, np.int32))


def test_install_is_idempotent():
    jit = cuda.jit
    install()
    assert cuda.jit is jit
