"""Estimates of rows' masses on a device: the exact ones lie between their bounds."""

import pytest

from tests import device_estimate
from tests.device_arrays import down, up
from tests.strategies import DTYPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [257, 32001, 248320])
def test_the_mass_lies_between_its_bounds(size, dtype):
    device_estimate.check_landscapes(up, down, dtype, size, size, each=1 + 10_000 // size)


def test_what_cant_be_known():
    device_estimate.check_what_cant_be_known(up, down)
