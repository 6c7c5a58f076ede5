"""adjust_logits of CuPy arrays, bit for bit its host twin; what the compiler makes of the kernels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import DECODING, adjust_logits, count_committed
from gpu.adjust.count_device import count_kernel
from gpu.adjust.kernel import adjust_kernel
from gpu.adjust.slots_kernel import slots_kernel
from tests import device_adjust, device_graph
from tests.device_arrays import down, up
from tests.ptx import analyse, compile_ptx
from tests.strategies import DTYPES, fuzz


@pytest.mark.gpu
@pytest.mark.parametrize("name", device_adjust.CASES)
def test_cases_are_the_hosts(name):
    device_adjust.check_case(up, down, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", device_adjust.SLOT_CASES)
def test_cases_of_slots_are_the_hosts(name):
    device_adjust.check_slot_case(up, down, name)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (64, 8), (65, 3), (513, 16)])
def test_committed_tokens_are_counted_as_on_the_host(batch, width):
    device_adjust.check_count(up, down, batch, width)


@pytest.mark.gpu
def test_what_is_out_of_range_is_skipped():
    device_adjust.check_what_is_out_of_range(up, down)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [device_adjust.check_arguments, device_adjust.check_slot_arguments])
def test_bad_arguments(arguments):
    for call, message in arguments(up):
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
@fuzz
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    width=st.integers(1, 9),
    size=st.sampled_from([1, 2, 33, 1000, 151_936]),
    dtype=st.sampled_from(DTYPES),
    penalties=st.sets(st.sampled_from(device_adjust.PENALTIES)),
    pad=st.integers(0, 3),
    in_place=st.booleans(),
)
def test_any_slots_are_the_hosts(dtype, in_place, **arguments):
    device_adjust.check_slots(up, down, dtype=dtype, in_place=in_place and dtype == "float32", **arguments)


@pytest.mark.gpu
def test_a_graph_of_slots():
    """Rounds that adjust and count, each on what the one before left and new logits and drafts."""
    rng = np.random.default_rng(4)
    first, second = rng.normal(size=(2, 3, 4, 500)).astype(np.float32)
    history, frequency = device_adjust.random_slots(rng, 3, 500), np.array([0.3, -0.9, 0.0], np.float32)
    verdict, _ = device_adjust.a_verdict(rng, 3, 4, 500)
    drafts, num_drafts = rng.integers(0, 4, (2, 3, 3)).astype(np.int32), np.array([3, 0, 2], np.int32)
    phases, want = np.full(3, DECODING, np.int32), np.empty(first.shape, np.float32)
    logits, own, committed = up(first), device_adjust.mapped(up, history), device_adjust.mapped(up, verdict)
    room, *on_device = up(want), *(up(array) for array in (drafts[0], num_drafts, frequency, phases))

    def call():
        adjust_logits(logits, *on_device[:2], history=own, frequency_penalty=on_device[2], out=room)
        count_committed(own.words, committed, on_device[3], DECODING)

    def change():
        logits.set(second)
        on_device[0].set(drafts[1])

    device_graph.replay(call, change)
    for x, of_round in zip((first, second), drafts, strict=True):
        adjust_logits(x, of_round, num_drafts, history=history, frequency_penalty=frequency, out=want)
        count_committed(history.words, verdict, phases, DECODING)
    np.testing.assert_array_equal(down(room).view(np.int32), want.view(np.int32))
    np.testing.assert_array_equal(down(own.words), history.words)


@pytest.mark.gpu
def test_a_graph():
    rng = np.random.default_rng(9)
    first, x = rng.normal(size=(2, 2, 3, 500)).astype(np.float32)
    drafts, num_drafts = np.array([[1, 2], [3, 3]], np.int32), np.array([1, 2], np.int32)
    presence = np.array([0.3, -0.9], np.float32)
    logits, on_device = up(first), [up(array) for array in (drafts, num_drafts, presence)]

    def call():
        adjust_logits(logits, *on_device[:2], presence_penalty=on_device[2])

    device_graph.replay(call, lambda: logits.set(x))
    adjust_logits(x, drafts, num_drafts, presence_penalty=presence)
    np.testing.assert_array_equal(down(logits).view(np.int32), x.view(np.int32))


KERNELS = {
    "lists": (adjust_kernel, ()),
    **{f"slots {name}": (slots_kernel, (name,)) for name in DTYPES},
    "count": (count_kernel, ()),
}


@pytest.mark.parametrize("case", KERNELS)
def test_the_kernels_round_every_step_and_keep_nothing_in_local_memory(case):
    factory, arguments = KERNELS[case]
    kernel = factory(*arguments)
    ptx = compile_ptx(kernel.function, kernel.signature.args)
    facts = analyse(ptx)
    assert facts.num_fma == facts.num_loose_products == facts.num_f64 == 0
    assert ("div.rn.f32" in ptx) == (case != "count")
    assert facts.num_local == facts.stack_bytes == facts.spill_bytes == 0
    assert not facts.atomics or case == "lists"
    # Of 512 threads two blocks a multiprocessor; of 256, which wait for memory at every row, five.
    assert facts.registers <= {"lists": 64, "slots": 48, "count": 32}[case.split()[0]]
