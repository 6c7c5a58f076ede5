"""torch's tensors as the arrays that `gpu` takes: NumPy's on the host, CuPy's on CUDA, without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gpu.device.foreign import array_at, on_stream

_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # its bits
    torch.int32: np.int32,
    torch.int64: np.int64,
}


def array_of(tensor: torch.Tensor) -> Any:
    """An array on the tensor's memory; of bfloat16, its bits in uint16."""
    if not tensor.is_cuda:
        return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    strides = None if tensor.is_contiguous() else tuple(step * tensor.element_size() for step in tensor.stride())
    return array_at(tensor.data_ptr(), tuple(tensor.shape), _DTYPES[tensor.dtype], strides, tensor)


@contextmanager
def same_stream(tensor: torch.Tensor) -> Iterator[None]:
    """`gpu` queues its work where torch does: on its current stream on the tensor's device."""
    if not tensor.is_cuda:
        yield
        return
    with torch.cuda.device(tensor.device), on_stream(torch.cuda.current_stream(tensor.device).cuda_stream):
        yield


def tensor_of(array: np.ndarray, dtype: Any, device: torch.device) -> torch.Tensor:
    """A tensor on a device; on the CPU the array's own memory, unless it is read-only or of another dtype."""
    return torch.from_numpy(np.require(array, dtype, ["C", "W"])).to(device)


def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros."""
    if device.type == "cpu":
        # NumPy's zeros are the system's own pages, touched only where something is written; torch would write them all.
        return torch.from_numpy(np.zeros(shape, _DTYPES[dtype])).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
