"""Where slots stand after a round: against the definition, on the host and on a device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import DECODING, FIRST, IDLE, OK, Progress, advance
from gpu.progress.device import advance_kernel
from tests import device_graph, device_progress
from tests.device_arrays import down, up
from tests.ptx import analyse, compile_ptx


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(0, 9),
    width=st.integers(1, 5),
    phase=st.sampled_from([FIRST, DECODING]),
)
def test_each_slot_moves_by_the_definition(seed, batch, width, phase):
    progress, verdict = device_progress.make(seed, batch, width)
    before = device_progress.mapped(progress, np.copy)
    max_drafts = seed % width
    advance(progress, verdict, phase, max_drafts)
    for b in range(batch):
        was = {name: values[b] for name, values in before.fields().items()}
        got = {name: values[b] for name, values in progress.fields().items()}
        if was["phase"] != phase:
            assert got == was
            continue
        committed = verdict.tokens[b][verdict.tokens[b] >= 0]
        want = {
            "anchor": committed[-1] if len(committed) else was["anchor"],
            "start": was["start"] + len(committed),
            "generated": was["generated"] + len(committed),
            "remaining": was["remaining"] - len(committed),
        }
        goes_on = verdict.status[b] == OK and len(committed) > 0 and want["remaining"] > 0
        want["phase"] = DECODING if goes_on else IDLE
        want["num_drafts"] = min(max_drafts, want["remaining"] - 1) if goes_on else 0
        assert got == want


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (64, 8), (65, 3), (513, 16)])
def test_a_device_is_the_host(batch, width):
    device_progress.check_advance(up, down, batch, width)


@pytest.mark.gpu
def test_a_graph():
    progress, verdict = device_progress.make(3, 6, 4)
    progress.phase[:] = DECODING
    own, committed = device_progress.mapped(progress, up), device_progress.mapped(verdict, up)
    device_graph.replay(lambda: advance(own, committed, DECODING, 3), lambda: None)
    for _ in range(2):
        advance(progress, verdict, DECODING, 3)
    for name, want in progress.fields().items():
        np.testing.assert_array_equal(down(getattr(own, name)), want, err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": np.zeros(2, np.int64)}, r"phase=int64\[2\], expected a contiguous NumPy array int32\[2\]"),
        ({"remaining": np.zeros(3, np.int64)}, r"remaining=int64\[3\], expected .* int64\[2\]"),
        ({"anchor": np.zeros(4, np.int64)[::2]}, r"anchor=int64\[2\], expected a contiguous"),
        ({"start": [0, 0]}, "start=list, expected"),
    ],
)
def test_bad_arrays(change, message):
    progress, verdict = device_progress.make(0, 2, 3)
    with pytest.raises(ValueError, match=message):
        advance(Progress(**{**progress.fields(), **change}), verdict, FIRST, 2)


@pytest.mark.parametrize(
    ("phase", "max_drafts", "message"),
    [(IDLE, 2, r"phase=0, expected FIRST \(1\) or DECODING \(2\)"), (FIRST, -1, "max_drafts=-1, expected at least 0")],
)
def test_bad_numbers(phase, max_drafts, message):
    with pytest.raises(ValueError, match=message):
        advance(*device_progress.make(0, 2, 3), phase, max_drafts)


def test_the_kernel_keeps_nothing_in_local_memory():
    kernel = advance_kernel()
    facts = analyse(compile_ptx(kernel.function, tuple(kernel.signature.args)))
    assert facts.num_f64 == facts.num_local == facts.stack_bytes == facts.spill_bytes == 0
    assert facts.registers <= 40
