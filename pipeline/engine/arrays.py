"""Tensors as the kernels' arrays, and small host arrays on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import gpu

_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


def array_of(tensor: torch.Tensor) -> Any:
    """The same memory as a NumPy array, or on CUDA as a CuPy array; bfloat16 as uint16 bits.

    What stands in for it must live as long as what reads it: for kernels in a graph, as long as the graph.
    """
    if tensor.device.type == "cpu":
        return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    size = tensor.element_size()
    strides = None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride())
    return gpu.array_at(tensor.data_ptr(), tuple(tensor.shape), _DTYPES[tensor.dtype], strides, tensor)


def send(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device; nobody waits for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)
