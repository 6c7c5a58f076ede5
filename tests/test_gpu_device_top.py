"""top_logprobs of CuPy arrays, bit for bit its host twin; what the compiler makes of its kernel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import select_support, top_logprobs
from gpu.top_tokens.kernel import top_kernel
from tests import device_graph, device_top
from tests.device_arrays import down, up
from tests.ptx import analyse, compile_ptx
from tests.strategies import DTYPES, cast, fuzz, landscape, row_batches


@pytest.mark.gpu
@pytest.mark.parametrize("name", device_top.CASES)
def test_cases_are_the_hosts(name):
    device_top.check_case(up, down, name)


@pytest.mark.gpu
def test_kinds_of_rows():
    device_top.check_kinds_of_rows(up, down)


@pytest.mark.gpu
def test_bad_arguments():
    for call, message in device_top.check_arguments(up):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
@fuzz
@given(
    rows=row_batches(vocabularies=(1, 33, 257, 2048, 32001)),
    k=st.sampled_from([1, 2, 5, 32, 128, 1024]),
    capacity=st.sampled_from([1, 64, 4096]),
    lead=st.integers(0, 17),
    pad=st.integers(0, 3),
)
def test_any_rows_are_the_hosts(rows, k, capacity, lead, pad):
    every = np.arange(len(rows.logits), dtype=np.int32)
    device_top.check(up, down, rows.logits, rows.filter_arguments()[1:], k, every, capacity, lead, pad)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [151_936, 262_144])
def test_whole_vocabularies_are_the_hosts(dtype, size):
    rng = np.random.default_rng(size)
    kinds = ("normal", "flat", "ties", "near_ties", "plateau", "zeros", "masked", "huge")
    x = cast(np.stack([landscape(kind, size, rng) for kind in kinds]), dtype)
    num = len(x)
    parameters = np.ones(num, np.float32), np.zeros(num, np.int32), np.ones(num, np.float32)
    for k in (1, 32, 128, 1024):
        device_top.check(up, down, x, parameters, k, np.arange(num), lead=k % 5)


@pytest.mark.gpu
def test_a_graph_of_the_filter_and_top_tokens():
    rng = np.random.default_rng(8)
    first, second = (rng.normal(size=(6, 5000)).astype(np.float32) for _ in range(2))
    parameters = np.ones(6, np.float32), np.zeros(6, np.int32), np.full(6, 0.9, np.float32)
    rows = np.array([3, 0, 5])
    logits, asked, on_device = up(first), up(rows), [up(array) for array in parameters]
    support = select_support(logits, *on_device, capacity=8)
    out = up(np.zeros((3, 40), np.int32)), up(np.zeros((3, 40), np.float32))
    zero = up(np.zeros(6, np.float32))

    def call():
        filtered = select_support(logits, *on_device, zero, capacity=8, out=support)
        top_logprobs(logits, filtered, 40, asked, out=out)

    device_graph.replay(call, lambda: logits.set(second))
    want = top_logprobs(second, select_support(second, *parameters, capacity=8), 40, rows)
    np.testing.assert_array_equal(down(out[0]), want[0])
    np.testing.assert_array_equal(down(out[1]).view(np.int32), want[1].view(np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_loads_16_bytes_and_keeps_nothing_in_local_memory(dtype):
    kernel = top_kernel(dtype, True)
    facts = analyse(compile_ptx(kernel.function, kernel.signature), kernel.max_registers)
    # Maxima in each of three places, listed granules, and two walks over the whole row.
    assert facts.num_16_byte_loads >= 6
    assert facts.num_local == facts.stack_bytes == facts.spill_bytes == 0
    assert facts.registers * kernel.threads <= 65536 // 3  # three blocks a multiprocessor
    assert facts.shared_bytes <= 32 * 1024
