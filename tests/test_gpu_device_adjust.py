"""adjust_logits of CuPy arrays, bit for bit its host twin; what the compiler makes of its kernel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import adjust_logits
from gpu.adjust.kernel import adjust_kernel
from tests import device_adjust, device_graph
from tests.device_arrays import down, up
from tests.ptx import analyse, compile_ptx
from tests.strategies import fuzz


@pytest.mark.gpu
@pytest.mark.parametrize("name", device_adjust.CASES)
def test_cases_are_the_hosts(name):
    device_adjust.check_case(up, down, name)


@pytest.mark.gpu
def test_what_is_out_of_range_is_skipped():
    device_adjust.check_what_is_out_of_range(up, down)


@pytest.mark.gpu
def test_bad_arguments():
    for call, message in device_adjust.check_arguments(up):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
@fuzz
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    width=st.integers(1, 9),
    size=st.sampled_from([1, 2, 33, 1000, 151_936]),
    history=st.sampled_from([0, 3, 100, 5000]),
    bias=st.sampled_from([0, 3, 300, 5000]),
    distinct=st.booleans(),
    penalties=st.sets(st.sampled_from(device_adjust.PENALTIES)),
    pad=st.integers(0, 3),
)
def test_any_requests_are_the_hosts(**arguments):
    device_adjust.check(up, down, **arguments)


@pytest.mark.gpu
def test_a_graph():
    rng = np.random.default_rng(9)
    x = rng.normal(size=(2, 3, 500)).astype(np.float32)
    drafts, num_drafts = np.array([[1, 2], [3, 3]], np.int32), np.array([1, 2], np.int32)
    presence = np.array([0.3, -0.9], np.float32)
    logits, on_device = up(x), [up(array) for array in (drafts, num_drafts, presence)]

    def call():
        adjust_logits(logits, *on_device[:2], presence_penalty=on_device[2])

    device_graph.replay(call, lambda: logits.set(x))
    adjust_logits(x, drafts, num_drafts, presence_penalty=presence)
    np.testing.assert_array_equal(down(logits).view(np.int32), x.view(np.int32))


def test_the_kernel_rounds_every_step_and_keeps_nothing_in_local_memory():
    kernel = adjust_kernel()
    ptx = compile_ptx(kernel.function, kernel.signature)
    facts = analyse(ptx)
    assert facts.num_fma == facts.num_loose_products == facts.num_f64 == 0
    assert "div.rn.f32" in ptx
    assert facts.num_local == facts.stack_bytes == facts.spill_bytes == 0
    assert facts.registers * kernel.threads <= 65536 // 2  # two blocks a multiprocessor
