"""RoundBuffer in the simulator."""

from functools import partial

import gpu.top_tokens.device
from tests.device_round_buffer import check_room, check_rounds, check_sizes
from tests.simulator.backend import Simulated

SIMULATED = Simulated()


def test_rounds_come_to_the_host(monkeypatch):
    kernel = gpu.top_tokens.device.top_kernel
    monkeypatch.setattr(gpu.top_tokens.device, "top_kernel", partial(kernel, threads=64))
    with SIMULATED.patched():
        check_rounds(SIMULATED)


def test_masks_that_do_not_fit():
    with SIMULATED.patched():
        check_room(SIMULATED)


def test_sizes():
    check_sizes()
