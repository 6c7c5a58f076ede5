"""The replay kernels in the simulator against their host twins."""

import pytest

from tests import device_replay
from tests.simulator.backend import Simulated

SIMULATED = Simulated()


@pytest.mark.parametrize("name", device_replay.CASES)
def test_cases_are_the_hosts(name):
    device_replay.check_case(SIMULATED, name)


def test_out_of_range_values_are_harmless():
    device_replay.check_out_of_range(SIMULATED)


def test_bad_arguments():
    for call, message in device_replay.check_arguments(SIMULATED.up):
        with pytest.raises(ValueError, match=message):
            call()
