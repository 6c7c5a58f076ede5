"""One element of a trainer's logits, or of their gradient, as float64: `read` and `write`.

bfloat16 is seen as its bits in uint16, float16 as its bits in int16 (see gpu.logit_rows); the type of the flat array
alone says how to decode. Reading is exact; writing rounds to the nearest, ties to even, by way of float32.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from gpu.logit_rows import load


def flat_rows(name: str, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The memory of [N, V] as one flat array of elements, and where each row starts in it, int64 [N].

    ValueError for a wrong rank, dtype or memory layout.
    """
    if not isinstance(array, np.ndarray) or array.ndim != 2:
        raise ValueError(f"{name}={getattr(array, 'shape', type(array).__name__)}, expected a NumPy array [N, V]")
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    elif array.dtype == np.float16:
        array = array.view(np.int16)
    elif array.dtype not in (np.float32, np.float64, np.uint16):
        raise ValueError(
            f"{name}.dtype={array.dtype}, expected float32, float64, float16, bfloat16, or uint16 with bfloat16 bits"
        )
    num_rows, vocabulary = array.shape
    row_step, token_step = (step // array.itemsize for step in array.strides)
    if array.size and ((vocabulary > 1 and token_step != 1) or (num_rows > 1 and row_step < 0)):
        raise ValueError(
            f"{name}.strides={array.strides}, expected adjacent tokens and forward rows: "
            "pass np.ascontiguousarray(logits)"
        )
    starts = row_step * np.arange(num_rows, dtype=np.int64)
    span = int(starts[-1]) + vocabulary if array.size else 0
    return np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,)), starts


def read(flat, index):
    """Element `index` of the flat array as float64."""
    raise NotImplementedError("kernels only")


@overload(read)
def _read(flat, index):
    if flat.dtype == types.float64:
        return lambda flat, index: flat[index]
    return lambda flat, index: np.float64(load(flat, index))


def write(flat, index, value):
    """Store a float64 as element `index` of the flat array."""
    raise NotImplementedError("kernels only")


@overload(write)
def _write(flat, index, value):
    if isinstance(flat.dtype, types.Float):

        def write_float(flat, index, value):
            flat[index] = value

        return write_float
    encode = bfloat16_bits if flat.dtype == types.uint16 else half_bits

    def write_bits(flat, index, value):
        flat[index] = encode(np.float32(value))

    return write_bits


@njit(nogil=True)
def bfloat16_bits(x):
    """The bits of a float32, rounded to bfloat16."""
    bits = np.int64(np.float32(x).view(np.uint32))
    if (bits & 0x7FFFFFFF) > 0x7F800000:  # rounding could carry a NaN into infinity
        return np.uint16((bits >> 16) | 0x40)
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@njit(nogil=True)
def half_bits(x):
    """The bits of a float32, rounded to float16 (IEEE 754 binary16)."""
    bits = np.int64(np.float32(x).view(np.uint32))
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        half = np.int64(0x7E00)
    elif magnitude >= 0x477FF000:  # half way from the largest float16 to 2^16
        half = np.int64(0x7C00)
    elif magnitude < 0x38800000:  # below 2^-14, where float16 has steps of 2^-24, like float32 at 1/2
        shifted = np.float32(np.uint32(magnitude).view(np.float32) + np.float32(0.5))
        half = np.int64(shifted.view(np.uint32)) - 0x3F000000
    else:
        half = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    half |= sign
    return np.int16(half - 0x10000 if half >= 0x8000 else half)
