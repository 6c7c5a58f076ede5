"""uniforms of CuPy arrays, bit for bit their host twin, and Philox's known answers."""

import numpy as np
import pytest

from gpu import DRAW, uniforms
from gpu.random.device import uniforms_kernel
from tests import device_graph, device_random
from tests.device_arrays import down, up
from tests.ptx import analyse, compile_ptx


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "width"), [(3, 5), (1, 1000), (513, 9), (0, 3), (3, 0)])
def test_uniforms_are_the_hosts(batch, width):
    device_random.check_uniforms(up, down, batch, width)


@pytest.mark.gpu
def test_known_answers():
    device_random.check_known_answers(up, down)


@pytest.mark.gpu
def test_bad_arguments():
    for call, message in device_random.check_arguments(up):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
def test_a_graph():
    seeds, positions = np.arange(4, dtype=np.uint64), np.arange(4)
    on_device, out = [up(seeds), up(positions)], up(np.zeros((4, 6)))
    device_graph.replay(lambda: uniforms(*on_device, 6, DRAW, out=out), lambda: on_device[1].set(positions + 7))
    np.testing.assert_array_equal(down(out), uniforms(seeds, positions + 7, 6, DRAW))


def test_the_kernel_keeps_nothing_in_local_memory():
    kernel = uniforms_kernel()
    facts = analyse(compile_ptx(kernel.function, kernel.signature))
    assert facts.num_fma == facts.num_local == facts.stack_bytes == facts.spill_bytes == 0
    assert facts.registers <= 40
