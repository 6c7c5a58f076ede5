"""advance and append_tokens in the simulator against their host twins, in blocks of 32 threads."""

from functools import partial

import numpy as np

import gpu.progress.append_device
import gpu.progress.device
from tests import device_progress
from tests.simulator.backend import up


def test_slots_move_as_on_the_host(monkeypatch):
    kernel = gpu.progress.device.advance_kernel
    monkeypatch.setattr(gpu.progress.device, "advance_kernel", partial(kernel, threads=32))
    device_progress.check_advance(up, np.asarray)


def test_tokens_go_where_they_go_on_the_host(monkeypatch):
    kernel = gpu.progress.append_device.append_kernel
    monkeypatch.setattr(gpu.progress.append_device, "append_kernel", partial(kernel, threads=32))
    device_progress.check_append(up, np.asarray, batch=20)
