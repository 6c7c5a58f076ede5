"""swiglu and turn_heads in the simulator against their host twins, in blocks of 32 threads."""

from functools import partial

import numpy as np
import pytest

import gpu.layers.gate
import gpu.layers.turn
from tests import device_layers
from tests.simulator.backend import up
from tests.strategies import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_the_host_twins(monkeypatch, dtype):
    for module, name in ((gpu.layers.gate, "swiglu_kernel"), (gpu.layers.turn, "turn_kernel")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), threads=32))
    device_layers.check_swiglu(up, np.asarray, dtype, count=3, width=20)
    device_layers.check_turn(up, np.asarray, dtype, batch=2, width=2, heads=3, held=1, size=8)
