"""Device arrays: allocation, argument checks, and logits as the kernels read them. No function synchronises."""

from typing import Any, NamedTuple

import numpy as np

from gpu.arrays import Array, on_device
from gpu.device.instructions import SIMULATED
from gpu.device.launch import pointer
from gpu.device.rows import Logits
from gpu.device.vectors import Format, format_of
from gpu.weights import MAX_VOCABULARY

_ALIGNED = 32  # bytes: a granule


class SimulatedArray(np.ndarray):
    """What stands for a CuPy array in the simulator."""

    simulated_device = True


def empty(shape: tuple[int, ...], dtype: type) -> Array:
    """A new device array."""
    if SIMULATED:
        return np.empty(shape, dtype).view(SimulatedArray)
    import cupy

    return cupy.empty(shape, dtype)


def zeros(shape: tuple[int, ...], dtype: type) -> Array:
    """A new device array of zeros."""
    array = empty(shape, dtype)
    array.fill(0)
    return array


def upload(array: np.ndarray) -> Array:
    """A host array's copy, C-contiguous, queued on CuPy's current stream."""
    array = np.ascontiguousarray(array)
    if SIMULATED:
        return array.copy().view(SimulatedArray)
    import cupy

    return cupy.asarray(array)


def download(array: Array) -> np.ndarray:
    """A device array's copy, after what is queued on CuPy's current stream; waits for it."""
    return np.array(array) if SIMULATED else array.get()


def check_device(name: str, value: Array, dtype: type, shape: tuple[int, ...]) -> Array:
    """`value` itself, if it is a C-contiguous device array of this dtype and shape; its values aren't read."""
    if not on_device(value) or value.dtype != dtype or value.shape != shape or not value.flags.c_contiguous:
        got = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
        raise ValueError(f"{name}={got}, expected a contiguous CuPy array {np.dtype(dtype)}{list(shape)}")
    return value


class DeviceLogits(NamedTuple):
    """Logits [R, V] or [B, W, V] as a kernel finds them.

    Kernels read whole granules, so up to 31 bytes before and behind the array: what the allocation holds there, since
    CUDA allocates in multiples of 256 bytes.
    """

    words: Any
    skew: int  # elements between the pointer, rounded down to a granule, and the first logit
    width: int  # rows a request
    row_step: int  # elements from a row to the next
    request_gap: int  # elements between a request's rows and the next one's, beyond row_step
    vocabulary: int
    form: Format
    num_rows: int

    @property
    def argument(self) -> Logits:
        """For the kernel."""
        return Logits(*self[:6])

    @property
    def request_step(self) -> int:
        """Elements from a request to the next."""
        return self.width * self.row_step + self.request_gap

    @property
    def num_granules(self) -> int:
        """The most granules that a row can touch."""
        size = 2 * self.form.lanes
        return (self.vocabulary + 2 * size - 2) // size


def device_logits(logits: Array, ndim: int, name: str = "logits") -> DeviceLogits:
    """A view of device logits; no copy. ValueError for a wrong rank, dtype, vocabulary or memory layout."""
    if not on_device(logits) or logits.ndim != ndim:
        got = getattr(logits, "shape", type(logits).__name__)
        raise ValueError(f"{name}={got}, expected a CuPy array of shape {'[R, V]' if ndim == 2 else '[B, W, V]'}")
    kind = "bfloat16" if logits.dtype == np.uint16 else logits.dtype.name
    if kind not in ("float32", "float16", "bfloat16"):
        raise ValueError(
            f"{name}.dtype={logits.dtype}, expected float32, float16, bfloat16, or uint16 with bfloat16 bits"
        )
    vocabulary = logits.shape[-1]
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        raise ValueError(f"vocabulary={vocabulary}, expected 1..{MAX_VOCABULARY}")
    size = logits.dtype.itemsize
    steps = [step if length > 1 else 0 for step, length in zip(logits.strides, logits.shape, strict=True)]
    if steps[-1] not in (0, size) or any(step < 0 or step % size for step in steps[:-1]):
        raise ValueError(
            f"{name}.strides={logits.strides}, expected adjacent tokens and forward rows: "
            "pass cupy.ascontiguousarray(logits)"
        )
    *outer, row_step = (step // size for step in steps[:-1])
    width = logits.shape[1] if ndim == 3 else 1
    request_gap = 0
    if ndim == 3 and logits.shape[0] > 1:
        if width == 1:
            row_step = outer[0]
        request_gap = outer[0] - width * row_step
    if SIMULATED:
        words, skew = _simulated_words(logits, request_gap, row_step, width), 0
    else:
        address = logits.data.ptr
        words, skew = address - address % _ALIGNED, address % _ALIGNED // size
    num_rows = logits.size // vocabulary
    return DeviceLogits(words, skew, width, row_step, request_gap, vocabulary, format_of(kind), num_rows)


def _simulated_words(logits: Array, request_gap: int, row_step: int, width: int) -> np.ndarray:
    requests = logits.size // (width * logits.shape[-1]) if logits.size else 0
    span = (requests * width - 1) * row_step + (requests - 1) * request_gap + logits.shape[-1] if requests else 0
    size = logits.dtype.itemsize
    flat = np.lib.stride_tricks.as_strided(np.asarray(logits), (span,), (size,))
    padded = np.zeros(-(-span * size // _ALIGNED) * _ALIGNED, np.uint8)
    padded[: span * size] = np.frombuffer(flat.tobytes(), np.uint8)
    return padded.view(np.uint32)


def view16(array: Array) -> Any:
    """A uint16 device array as a kernel's pointer to words."""
    return np.asarray(array).reshape(-1).view(np.uint32) if SIMULATED else pointer(array)
