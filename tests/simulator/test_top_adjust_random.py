"""Top tokens, penalties and random numbers in the simulator against their host twins, in blocks of 64 threads."""

from functools import partial

import pytest

import gpu.adjust.count_device
import gpu.adjust.device
import gpu.adjust.slots_device
import gpu.random.device
import gpu.support.device
import gpu.top_tokens.device
from tests import device_adjust, device_random, device_top
from tests.simulator.backend import down, up

KERNELS = (
    (gpu.support.device, "scan_kernel"),
    (gpu.support.device, "pick_kernel"),
    (gpu.top_tokens.device, "top_kernel"),
    (gpu.adjust.device, "adjust_kernel"),
    (gpu.adjust.slots_device, "slots_kernel"),
    (gpu.adjust.count_device, "count_kernel"),
    (gpu.random.device, "uniforms_kernel"),
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, partial(getattr(module, name), threads=64))


@pytest.mark.parametrize("name", device_top.CASES)
def test_top_tokens_are_the_hosts(name):
    device_top.check_case(up, down, name)


def test_kinds_of_rows():
    device_top.check_kinds_of_rows(up, down)


@pytest.mark.parametrize("name", device_adjust.CASES)
def test_adjusted_logits_are_the_hosts(name):
    device_adjust.check_case(up, down, name)


@pytest.mark.parametrize("name", device_adjust.SLOT_CASES)
def test_adjusted_logits_of_slots_are_the_hosts(name):
    device_adjust.check_slot_case(up, down, name)


def test_committed_tokens_are_counted_as_on_the_host():
    device_adjust.check_count(up, down)


def test_adjust_skips_what_is_out_of_range():
    device_adjust.check_what_is_out_of_range(up, down)


def test_uniforms_are_the_hosts():
    device_random.check_uniforms(up, down)
    device_random.check_uniforms(up, down, batch=1, width=70)
    device_random.check_uniforms(up, down, batch=0)
    device_random.check_uniforms(up, down, width=0)


def test_known_answers():
    device_random.check_known_answers(up, down)


@pytest.mark.parametrize(
    "arguments",
    [
        device_top.check_arguments,
        device_adjust.check_arguments,
        device_adjust.check_slot_arguments,
        device_random.check_arguments,
    ],
)
def test_bad_arguments(arguments):
    for call, message in arguments(up):
        with pytest.raises(ValueError, match=message):
            call()
