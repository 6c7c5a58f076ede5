"""The door of the device functions, as far as it needs no device."""

import pytest

from tests.device_door import CASES, call
from tests.simulator.backend import Simulated

SIMULATED = Simulated(threads=32)


@pytest.mark.parametrize(("function", "change", "message"), CASES)
def test_bad_arguments(function, change, message):
    with SIMULATED.patched(), pytest.raises(ValueError, match=message):
        call(function, change, SIMULATED.up)


@pytest.mark.parametrize("function", ["select_support", "verify_chain", "capture_masks"])
def test_good_arguments(function):
    with SIMULATED.patched():
        call(function, lambda up: {}, SIMULATED.up)
