"""Arguments that contradict each other, or whose values nobody checks on a device."""

import numpy as np
import pytest

from gpu import INVALID, select_support, verify_chain
from tests import cuda_simulator
from tests.backends import HOST, assert_same
from tests.device_door import filter_arguments, verify_arguments
from tests.rounds import make_round
from tests.simulator.backend import Simulated

SIMULATED = Simulated(threads=32)


@pytest.mark.parametrize(("first", "then"), [("bfloat16", "float32"), ("float16", "float32")])
def test_out_of_another_dtype_is_refused_or_right(first, then):
    """segments holds too few of a granule half as large: writes past the row, and past the array."""
    simulated, size = Simulated(threads=256), 1000
    up = simulated.up
    a, b = (make_round(3, 2, 1, size, dtype, num_poisoned=0, greedy=0) for dtype in (first, then))
    for round_ in (a, b):
        round_.parameters[0][:], round_.parameters[1][:], round_.parameters[2][:] = 1, 0, 1
    with simulated.patched():
        out = select_support(*map(up, (a.rows, *a.parameters)), capacity=1)
        try:
            got = select_support(*map(up, (b.rows, *b.parameters)), capacity=1, out=out)
        except ValueError:
            return
    assert_same(simulated.to_host(got), HOST.select_support(b.rows, *b.parameters, capacity=1))


def test_a_host_support_beside_device_logits():
    arguments = verify_arguments(SIMULATED.up)
    host = filter_arguments(lambda array: array)
    with pytest.raises(ValueError, match="support"), SIMULATED.patched():
        verify_chain(**{**arguments, "support": select_support(**host)})


@pytest.mark.parametrize("num_drafts", [-1, 2, 1000])
def test_drafts_out_of_range_make_their_request_invalid(num_drafts):
    """As parameters out of range do: -1 gives num_accepted = W, and W or more reads the next request's drafts."""
    arguments = verify_arguments(SIMULATED.up)
    arguments["num_drafts"] = SIMULATED.up(np.array([num_drafts], np.int32))
    with SIMULATED.patched():
        verdict = verify_chain(**arguments)
    assert verdict.status[0] == INVALID
    assert verdict.num_accepted[0] == verdict.num_committed[0] == 0


@pytest.mark.parametrize("uniform", [np.nan, -1.0])
def test_a_bad_draw_uniform_draws_no_arbitrary_token(uniform):
    """No thread finds the threshold, so what shared memory held is committed as a token."""
    arguments = verify_arguments(SIMULATED.up)
    arguments["num_drafts"] = SIMULATED.up(np.zeros(1, np.int32))
    arguments["draw_uniforms"] = SIMULATED.up(np.array([[uniform, 0.5]]))
    tokens = []
    for poison in (0x00, 0x01):
        cuda_simulator._POISON, before = poison, cuda_simulator._POISON
        with SIMULATED.patched():
            tokens.append(verify_chain(**arguments).tokens[0, 0])
        cuda_simulator._POISON = before
    assert tokens[0] == tokens[1]
