"""Estimates of rows' masses in the simulator: over one and several chunks a row, at any place in memory."""

from contextlib import contextmanager
from unittest import mock

import pytest

from gpu.support import device as support_device
from tests import device_estimate
from tests.simulator.backend import Simulated, down, up

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")


@contextmanager
def at(skew):
    """The kernels in blocks of a warp, the first logit this far behind a granule's boundary."""
    with (
        Simulated(32, skew).patched(),
        mock.patch.object(device_estimate, "device_logits", support_device.device_logits),
    ):
        yield


@pytest.mark.parametrize(("dtype", "size", "skew"), [("float32", 530, 3), ("float16", 300, 0), ("bfloat16", 1040, 9)])
def test_the_mass_lies_between_its_bounds(dtype, size, skew):
    with at(skew):
        device_estimate.check_landscapes(up, down, dtype, size, 3)


def test_what_cant_be_known():
    with at(5):
        device_estimate.check_what_cant_be_known(up, down)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_margin_holds_the_worst_rounding(dtype):
    with at(0):
        device_estimate.check_worst_rounding(up, down, dtype)
