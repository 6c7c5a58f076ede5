"""Tests that run kernels in Numba's CUDA simulator: a process of their own, with NUMBA_ENABLE_CUDASIM=1."""

import os

import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    raise pytest.UsageError("expected NUMBA_ENABLE_CUDASIM=1: NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/simulator")

from tests.cuda_simulator import install

install()
