"""The gate of an MLP: silu(gate) * up (SwiGLU: Shazeer 2020, arXiv 2002.05202), in float32, rounded once."""

import math
from functools import lru_cache

import numpy as np
from numba import cuda, int32, types, void

from gpu.arrays import Array, on_device
from gpu.checks import check_like
from gpu.device.launch import Kernel, pointer_to
from gpu.layers.elements import check_format, nearest, to_float32, words_of, words_pointer

THREADS = 256


def swiglu(rows: Array, out: Array) -> None:
    """out[n, i] = silu(rows[n, i]) * rows[n, M + i], where silu(x) = x / (1 + exp(-x)).

    rows [N, 2 * M]: a row's gates and, behind them, what they gate; float32, float16, or uint16 with the bits of
    bfloat16. out [N, M], of the same dtype. Both are NumPy's, or both CuPy's: there it is one launch, and the last bit
    may differ, as exp's may. ValueError for other arrays, and for an odd M of a 16-bit dtype.
    """
    shape: tuple[int, ...] = getattr(rows, "shape", ())
    if len(shape) != 2 or shape[1] % 2:
        raise ValueError(f"rows={list(shape)}, expected [N, 2 * M]")
    form, device, (count, width) = check_format("rows", rows), on_device(rows), (shape[0], shape[1] // 2)
    check_like("rows", rows, rows.dtype, shape, device)
    check_like("out", out, rows.dtype, (count, width), device)
    lanes = words_of(form).lanes
    if width % lanes:
        raise ValueError(f"rows={list(shape)}, expected M to be even where elements have 16 bits")
    if not device:
        values = to_float32(rows)
        gate, up = values[:, :width], values[:, width:]
        with np.errstate(over="ignore", invalid="ignore"):
            out[...] = nearest(gate / (np.float32(1) + np.exp(-gate)) * up, rows.dtype)
    elif out.size:
        kernel = swiglu_kernel(form)
        words = width // lanes
        kernel.launch(
            (-(-count * words // kernel.threads),), words_pointer(rows), words_pointer(out), count * words, words
        )


@lru_cache
def swiglu_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for this format; its grid is (ceil(words of out / threads),)."""
    lanes, unpack, pack = words_of(name)

    @cuda.jit(device=True)
    def gated(gate, up):
        return np.float32(np.float32(gate / np.float32(np.float32(1.0) + math.exp(np.float32(-gate)))) * up)

    def gate(rows, out, count, width):
        index = np.int32(cuda.blockIdx.x * threads + cuda.threadIdx.x)
        if index >= count:
            return
        row = np.int32(np.uint32(index) // np.uint32(width))
        at = np.int64(np.int64(row) * width + index)  # two widths a row
        a0, a1 = unpack(rows[at])
        b0, b1 = unpack(rows[at + width])
        second = np.float32(0.0)
        if lanes == 2:
            second = gated(a1, b1)
        out[np.int64(index)] = pack(gated(a0, b0), second)

    words = pointer_to(types.uint32)
    return Kernel(gate, void(words, words, int32, int32), threads)
