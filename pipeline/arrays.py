"""torch's tensors as the arrays that `gpu` takes: NumPy's on the host, CuPy's on CUDA, without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import gpu

DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # its bits
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
"""What arrays call torch's element types."""

_ALIGNED = 16  # bytes


def array_of(tensor: torch.Tensor) -> Any:
    """An array on the tensor's memory; of bfloat16, its bits in uint16.

    What stands in for it must live as long as what reads it: for kernels in a graph, as long as the graph.
    """
    if not tensor.is_cuda:
        return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    size = tensor.element_size()
    strides = None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride())
    return gpu.array_at(tensor.data_ptr(), tuple(tensor.shape), DTYPES[tensor.dtype], strides, tensor)


def send(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device; nobody waits for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def send_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Host arrays on the device in one copy, for which nobody waits."""
    parts = [np.ascontiguousarray(values) for values in arrays]
    *begins, end = np.cumsum([0, *(-(-part.nbytes // _ALIGNED) * _ALIGNED for part in parts)]).tolist()
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    room = packed.numpy()
    for begin, part in zip(begins, parts, strict=True):
        room[begin : begin + part.nbytes] = part.reshape(-1).view(np.uint8)
    there = packed.to(device, non_blocking=True)
    return [
        there[begin : begin + part.nbytes].view(torch.from_numpy(part).dtype).view(part.shape)
        for begin, part in zip(begins, parts, strict=True)
    ]


@contextmanager
def torchs_stream(device: torch.device) -> Iterator[None]:
    """`gpu` queues its work where torch does: on its current stream on this device."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), gpu.on_stream(torch.cuda.current_stream(device).cuda_stream):
        yield
