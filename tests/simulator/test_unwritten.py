"""No kernel of a round reads what nothing has written, in the simulator."""

import numpy as np
import pytest

from gpu.device import launch, memory
from tests.sanitized_rounds import Sizes, run_kinds
from tests.simulator.backend import Simulated
from tests.simulator.unwritten import Unwritten, watched

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")


def test_only_what_was_written_can_be_read():
    with watched():
        array = memory.empty((2, 3), np.int64)
        pointer = launch.pointer(array[1])
        with pytest.raises(Unwritten, match="index=1 of int64"):
            pointer[1]
        pointer[1] = 7
        assert launch.pointer(array)[4] == 7
        array[0] = 1  # by the host
        assert launch.pointer(array)[0] == 1
        assert launch.pointer(memory.zeros((2,), np.uint8))[1] == 0


@pytest.mark.parametrize(
    ("sizes", "whole_rows"),
    [
        (Sizes(2, 5, 90, "bfloat16", "float32", "top_k_first", 12), False),
        (Sizes(2, 3, 150, "float32", "bfloat16", "joint", 9), True),
    ],
)
def test_rounds_read_nothing_unwritten(sizes, whole_rows):
    with watched():
        run_kinds(Simulated(32, whole_rows=whole_rows), 1, sizes)  # the seed: some have fewer drafts
