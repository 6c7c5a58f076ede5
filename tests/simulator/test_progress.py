"""advance in the simulator against its host twin, in blocks of 32 threads."""

from functools import partial

import numpy as np

import gpu.progress.device
from gpu.device.memory import SimulatedArray
from tests import device_progress


def test_slots_move_as_on_the_host(monkeypatch):
    kernel = gpu.progress.device.advance_kernel
    monkeypatch.setattr(gpu.progress.device, "advance_kernel", partial(kernel, threads=32))
    device_progress.check_advance(lambda array: array.copy().view(SimulatedArray), np.asarray)
