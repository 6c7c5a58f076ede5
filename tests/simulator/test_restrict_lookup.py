"""Masks and prompt lookup in the simulator against their host twins, in blocks of 64 threads."""

from functools import partial

import pytest

import gpu.adjust.restrict_device
import gpu.lookup.device
from tests import device_lookup, device_restrict
from tests.simulator.backend import down, up


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    for module, name in ((gpu.adjust.restrict_device, "restrict_kernel"), (gpu.lookup.device, "lookup_kernel")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), threads=64))


@pytest.mark.parametrize("name", device_restrict.CASES)
def test_restricted_logits_are_the_hosts(name):
    device_restrict.check_case(up, down, name)


def test_rows_without_a_mask_stay():
    device_restrict.check_what_is_out_of_range(up, down)


@pytest.mark.parametrize("name", device_lookup.CASES)
def test_drafts_are_the_hosts(name):
    device_lookup.check_case(up, down, name)


def test_lengths_are_cut():
    device_lookup.check_lengths_out_of_range(up, down)


@pytest.mark.parametrize("cases", [device_restrict, device_lookup])
def test_bad_arguments(cases):
    for call, message in cases.check_arguments(up):
        with pytest.raises(ValueError, match=message):
            call()
