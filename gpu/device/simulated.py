"""Plain Python in place of gpu/device/ptx.py, for the CUDA simulator: pointers are NumPy arrays there."""

import threading

import numpy as np
from numba import cuda

_LOCK = threading.Lock()


def load_kept(words, index):
    """Four words from words + 4*index; what lies beyond the array reads as 0."""
    first = 4 * int(index)
    return tuple(np.uint32(words[i]) if i < words.shape[0] else np.uint32(0) for i in range(first, first + 4))


def load_four(stride):
    """A function (words, index, left) -> 16 words: four vectors, `stride` vectors apart, up to `left` ones further."""

    def load(words, index, left):
        found: list[np.uint32] = []
        for i in range(4):
            inside = left >= i * stride
            found += load_kept(words, index + i * stride) if inside else [np.uint32(0xDEADBEEF)] * 4
        return tuple(found)

    return load


def _larger(a, b, decode):
    values = decode(a), decode(b)
    if np.isnan(values[0]) or np.isnan(values[1]):
        return None
    if values[0] == values[1]:  # -0 is below +0
        return b if np.signbit(values[0]) else a
    return a if values[0] > values[1] else b


def _packed(a, b, decode):
    result = 0
    for shift in (0, 16):
        high, low = ((int(word) >> shift) & 0xFFFF for word in (a, b))
        half = _larger(high, low, decode)
        result |= (0x7FFF if half is None else half) << shift
    return np.uint32(result)


def max_bfloat16x2(a, b):
    """The larger of each half, as bfloat16; NaN if either is."""
    return _packed(a, b, lambda bits: np.uint32(bits << 16).view(np.float32))


def max_float16x2(a, b):
    """The larger of each half, as float16; NaN if either is."""
    return _packed(a, b, lambda bits: np.uint16(bits).view(np.float16))


def max_float32(a, b):
    """The larger of two float32 given as bits; NaN if either is."""
    bits = _larger(int(a), int(b), lambda bits: np.uint32(bits).view(np.float32))
    return np.uint32(0x7FFFFFFF if bits is None else bits)


def half_to_float(bits):
    """The float32 of the float16 in the low half of a word."""
    return np.float32(np.uint16(int(bits) & 0xFFFF).view(np.float16))


def float_to_half(value):
    """The bits of the float16 nearest to a float32, in the low half of a word."""
    with np.errstate(over="ignore"):
        return np.uint32(np.float16(value).view(np.uint16))


def divide_approximately(a, b):
    """a/b of two float32, almost."""
    return np.float32(np.float32(a) / np.float32(b))


def exp2_approximate(value):
    """2^value of a float32, almost."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp2(np.float32(value))


def add_at(pointer, index, value):
    """Atomic pointer[index] += value; returns what was there."""
    with _LOCK:
        before = pointer[index]
        pointer[index] = before + value
    return before


@cuda.jit(device=True)
def warp_max_u32(value):
    """The largest uint32 of the warp."""
    for i in range(5):
        value = max(value, np.uint32(cuda.shfl_xor_sync(0xFFFFFFFF, np.int32(value), 1 << i)))
    return value


@cuda.jit(device=True)
def warp_min_u32(value):
    """The smallest uint32 of the warp."""
    for i in range(5):
        value = min(value, np.uint32(cuda.shfl_xor_sync(0xFFFFFFFF, np.int32(value), 1 << i)))
    return value


@cuda.jit(device=True)
def warp_sum_s32(value):
    """The int32 sum of the warp."""
    for i in range(5):
        value = np.int32(value + cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << i))
    return value


def fetch_early(pointer, index):
    """Nothing: no memory is far."""


def make_known(pointer, index, value):
    """pointer[index] = value."""
    pointer[index] = value


def what_is_known(pointer, index):
    """pointer[index]; blocks run in the order of their numbers, so what a kernel may wait for is there."""
    if pointer[index] == 0.0:
        raise RuntimeError(f"index={index}, expected a number that a block of lower number has made known")
    return pointer[index]


def take_ticket(pointer, index):
    """Atomic pointer[index] += 1; returns what was there."""
    return add_at(pointer, index, np.int64(1))
