"""What every test runs under."""

import os
from pathlib import Path

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (folder := os.environ.get("NUMBA_CACHE_DIR")):
    # A cache of compiled kernels each: Numba's isn't made for two processes that write to it.
    os.environ["NUMBA_CACHE_DIR"] = str(Path(folder) / worker)

import numba
import pytest
import torch

from tests import strategies
from tests.backends import DEVICE, HOST

# Models and blocks are tiny here: a second thread only waits, and waits badly where tests run side by side.
# tests/test_threads.py holds that their number changes nothing.
torch.set_num_threads(1)
numba.set_num_threads(1)


@pytest.fixture(
    scope="session", params=[HOST, pytest.param(DEVICE, marks=pytest.mark.gpu)], ids=lambda backend: backend.name
)
def backend(request):
    """Where the kernels run."""
    return request.param


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    if strategies.FUZZING:
        terminalreporter.write_line(f"fuzzed {strategies.num_rows} rows")
