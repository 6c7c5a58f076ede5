"""Argument checks shared by the public functions: ValueError, `name=value, expected ...`."""

from typing import Any

import numpy as np

from gpu.arrays import Array, on_device


def check_array(name: str, value: np.ndarray, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """`value` itself, C-contiguous, if it has this dtype and shape."""
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != shape:
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{name}={got}, expected a NumPy array {np.dtype(dtype)}{list(shape)}")
    return np.ascontiguousarray(value)


def check_like(name: str, array: Any, dtype: type, shape: tuple[int, ...], device: bool) -> Array:
    """`array` itself, if it is contiguous, of this dtype and shape, and where the others are."""
    whose = "CuPy" if device else "NumPy"
    right = hasattr(array, "flags") and on_device(array) == device
    if not right or array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        got = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
        raise ValueError(f"{name}={got}, expected a contiguous {whose} array {np.dtype(dtype)}{list(shape)}")
    return array


def check_range(name: str, value: np.ndarray, good: np.ndarray, expected: str) -> None:
    """Raise for the first element of `value` that isn't `good`."""
    if not good.all():
        where = np.argwhere(~good)[0].tolist()
        raise ValueError(f"{name}[{', '.join(map(str, where))}]={value[tuple(where)]}, expected {expected}")


def check_uniforms(name: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """float64 uniforms in [0, 1)."""
    value = check_array(name, value, np.float64, shape)
    check_range(name, value, (value >= 0) & (value < 1), "a uniform in [0, 1)")
    return value


def check_csr(name: str, offsets: np.ndarray, num_rows: int, num_entries: int) -> np.ndarray:
    """int64 CSR offsets: num_rows + 1 of them, from 0 up to num_entries."""
    offsets = check_array(name, offsets, np.int64, (num_rows + 1,))
    if offsets[0] != 0 or offsets[-1] != num_entries or (np.diff(offsets) < 0).any():
        raise ValueError(f"{name}={offsets.tolist()}, expected ascending offsets from 0 to {num_entries}")
    return offsets


def check_ids(name: str, ids: np.ndarray, vocabulary: int) -> np.ndarray:
    """int32 token ids [n] in 0..vocabulary-1."""
    ids = check_array(name, ids, np.int32, (np.size(ids),))
    check_range(name, ids, (ids >= 0) & (ids < vocabulary), f"a token id below {vocabulary}")
    return ids
