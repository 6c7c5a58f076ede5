"""Logits as the kernels read them: one flat buffer that they only read, the start of every row, and `load`.

| Logits | In the flat buffer |
|---|---|
| float32; in replay also float64 | the same |
| bfloat16: ml_dtypes' type, or uint16 holding the bits | uint16 |
| float16 | int16 holding the bits |

The element type alone says how to decode, so each kernel is compiled for the types in use only. Decoding is
exact. Rows and requests may be strided views; the tokens of a row must be adjacent in memory.
"""

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from gpu.weights import MAX_VOCABULARY


class LogitRows(NamedTuple):
    """What a kernel takes in place of logits [R, V] or [B, W, V]."""

    flat: np.ndarray  # float32, float64, uint16 or int16 [span]
    starts: np.ndarray  # int64 [R]: where row r begins in flat
    vocabulary: int


class _Memory:
    """The memory of an array as a flat buffer. Marked writable: one compiled kernel serves both kinds."""

    def __init__(self, array: np.ndarray, dtype: np.dtype, span: int):
        self.array = array
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": (span,),
            "data": (array.__array_interface__["data"][0], False),
        }


def logit_rows(logits: np.ndarray, ndim: int) -> LogitRows:
    """A view of the logits; no copy. ValueError for a wrong rank, dtype, vocabulary or memory layout."""
    rows = element_rows("logits", logits, ndim)
    if not 1 <= rows.vocabulary <= MAX_VOCABULARY:
        raise ValueError(f"vocabulary={rows.vocabulary}, expected 1..{MAX_VOCABULARY}")
    return rows


def element_rows(name: str, array: np.ndarray, ndim: int, *, float64: bool = False) -> LogitRows:
    """The same of an array of any vocabulary that messages call `name`; float64 where it is allowed."""
    shape = "[R, V]" if ndim == 2 else "[B, W, V]"
    if not isinstance(array, np.ndarray) or array.ndim != ndim:
        got = getattr(array, "shape", type(array).__name__)
        raise ValueError(f"{name}={got}, expected a NumPy array of shape {shape}")
    kind: type
    if array.dtype == np.float32:
        kind = np.float32
    elif array.dtype == np.float64 and float64:
        kind = np.float64
    elif array.dtype == np.float16:
        kind = np.int16
    elif array.dtype == np.uint16 or array.dtype.name == "bfloat16":
        kind = np.uint16
    else:
        allowed = "float32, float64, float16" if float64 else "float32, float16"
        raise ValueError(f"{name}.dtype={array.dtype}, expected {allowed}, bfloat16, or uint16 with bfloat16 bits")
    vocabulary = array.shape[-1]
    size = array.itemsize
    strides = [step if length > 1 else 0 for step, length in zip(array.strides, array.shape, strict=True)]
    if (strides[-1] not in (0, size)) or any(step < 0 or step % size for step in strides[:-1]):
        raise ValueError(
            f"{name}.strides={array.strides}, expected adjacent tokens and forward rows: "
            f"pass np.ascontiguousarray({name})"
        )
    steps = [step // size for step in strides[:-1]]
    starts = np.zeros((), np.int64)
    for step, length in zip(steps, array.shape[:-1], strict=True):
        starts = starts[..., None] + step * np.arange(length, dtype=np.int64)
    if array.size == 0:
        return LogitRows(np.empty(0, kind), starts.ravel(), vocabulary)
    span = vocabulary + int(starts.max())
    flat = np.asarray(_Memory(array, np.dtype(kind), span))
    return LogitRows(flat, starts.ravel(), vocabulary)


def load(flat, index):
    """Element `index` of the flat buffer as float32; of a float64 buffer as float64."""
    raise NotImplementedError("kernels only")


@overload(load)
def _load(flat, index):
    if isinstance(flat.dtype, types.Float):
        return lambda flat, index: flat[index]
    if flat.dtype == types.uint16:
        return lambda flat, index: np.int32(np.int32(flat[index]) << np.int32(16)).view(np.float32)

    def load_half(flat, index):
        bits = np.int32(flat[index])
        magnitude = np.int32((bits & np.int32(0x7FFF)) << np.int32(13))
        # Rebiasing the exponent by a product is exact and decodes subnormals too.
        value = np.int32(magnitude).view(np.float32) * np.float32(2.0**112)
        finite = magnitude < np.int32(0x0F800000)
        decoded = np.float32(value).view(np.int32) if finite else np.int32(magnitude | np.int32(0x7F800000))
        return np.int32(decoded | (bits & np.int32(-0x80000000))).view(np.float32)

    return load_half
