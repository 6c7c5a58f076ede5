"""Rows of float32, float16 or bfloat16 as layers' kernels move them: by words of 32 bits, in float32 between."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.arrays import Array
from gpu.device.instructions import float_to_half, half_to_float
from gpu.device.launch import pointer

NAMES = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}
"""Formats by dtype; bfloat16 as its bits."""


class Words(NamedTuple):
    """How a kernel reads and writes a word of one format."""

    lanes: int  # elements a word
    unpack: Any  # (word) -> two float32; of float32 the second is 0
    pack: Any  # (float32, float32) -> the word of the nearest elements, halves to even


@cuda.jit(device=True)
def _unpack_float32(word):
    return np.uint32(word).view(np.float32), np.float32(0.0)


@cuda.jit(device=True)
def _pack_float32(first, second):
    return np.float32(first).view(np.uint32)


@cuda.jit(device=True)
def _unpack_float16(word):
    return half_to_float(np.uint32(word & np.uint32(0xFFFF))), half_to_float(np.uint32(word >> np.uint32(16)))


@cuda.jit(device=True)
def _pack_float16(first, second):
    return np.uint32(float_to_half(np.float32(first)) | np.uint32(float_to_half(np.float32(second)) << np.uint32(16)))


@cuda.jit(device=True)
def _unpack_bfloat16(word):
    return (
        np.uint32(word << np.uint32(16)).view(np.float32),
        np.uint32(word & np.uint32(0xFFFF0000)).view(np.float32),
    )


@cuda.jit(device=True)
def _bfloat16(value):
    # The upper half of a float32, rounded; a NaN whose payload lies below stays one.
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))
    return rounded if value == value else np.uint32(0x7FC0)


@cuda.jit(device=True)
def _pack_bfloat16(first, second):
    return np.uint32(_bfloat16(first) | np.uint32(_bfloat16(second) << np.uint32(16)))


@lru_cache
def words_of(name: str) -> Words:
    """Of a format's name."""
    return {
        "float32": Words(1, _unpack_float32, _pack_float32),
        "float16": Words(2, _unpack_float16, _pack_float16),
        "bfloat16": Words(2, _unpack_bfloat16, _pack_bfloat16),
    }[name]


def to_float32(array: np.ndarray) -> np.ndarray:
    """The host's elements of one of the dtypes, exactly."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def nearest(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 values in one of the dtypes, halves to even."""
    if dtype != np.uint16:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def check_format(name: str, array: Array) -> str:
    """The name of the array's format. ValueError for other dtypes."""
    dtype = getattr(array, "dtype", None)
    if dtype not in NAMES:
        raise ValueError(f"{name}.dtype={dtype}, expected float32, float16, or uint16 with the bits of bfloat16")
    return NAMES[dtype]


def words_pointer(array: Array) -> Any:
    """A device array of one of the dtypes as a kernel's pointer to words."""
    return pointer(array.view(np.uint32) if isinstance(array, np.ndarray) else array)
