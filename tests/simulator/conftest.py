"""Tests that run kernels in Numba's CUDA simulator: a process of their own, with NUMBA_ENABLE_CUDASIM=1."""

import os

import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    raise pytest.UsageError("expected NUMBA_ENABLE_CUDASIM=1: NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/simulator")

from tests.cuda_simulator import install

install()

from gpu.device import instructions, simulated  # noqa: E402

# Before a kernel's module takes them by name.
for _name, _stand_in in vars(simulated).items():
    if not _name.startswith("_") and hasattr(instructions, _name):
        setattr(instructions, _name, _stand_in)
