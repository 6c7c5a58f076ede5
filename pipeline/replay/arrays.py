"""Trainers' arrays as tensors, and memory for results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pipeline.arrays import DTYPES


def tensor_of(array: np.ndarray, dtype: Any, device: torch.device) -> torch.Tensor:
    """A tensor on a device; on the CPU the array's own memory, unless it is read-only or of another dtype."""
    return torch.from_numpy(np.require(array, dtype, ["C", "W"])).to(device)


def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros."""
    if device.type == "cpu":
        # NumPy's zeros are the system's own pages, touched only where something is written; torch would write them all.
        return torch.from_numpy(np.zeros(shape, DTYPES[dtype])).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
