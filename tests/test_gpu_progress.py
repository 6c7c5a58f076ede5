"""Where slots stand after a round: against the definition, on the host and on a device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import DECODING, FIRST, IDLE, OK, Progress, advance, append_tokens
from gpu.progress.append_device import append_kernel
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


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(0, 9),
    width=st.integers(1, 5),
    longest=st.integers(0, 9),
    phase=st.sampled_from([FIRST, DECODING]),
)
def test_tokens_go_behind_the_newest(seed, batch, width, longest, phase):
    tokens, progress, verdict = device_progress.make_tokens(seed, batch, width, longest)
    before = tokens.copy()
    append_tokens(tokens, progress, verdict, phase)
    for b in range(batch):
        want = before[b].tolist()
        if progress.phase[b] == phase:
            first = int(progress.start[b]) + 1
            committed = verdict.tokens[b][verdict.tokens[b] >= 0].tolist()
            want[first : first + len(committed)] = committed[: max(longest - first, 0)]
        assert tokens[b].tolist() == want


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (64, 8), (65, 3), (513, 16)])
def test_a_device_is_the_host(batch, width):
    device_progress.check_advance(up, down, batch, width)
    device_progress.check_append(up, down, batch, width)


@pytest.mark.gpu
def test_a_graph():
    progress, verdict = device_progress.make(3, 6, 4)
    second = device_progress.make(4, 6, 4)[1]
    progress.phase[:] = DECODING
    committed = device_progress.mapped(verdict, up)
    tokens = np.zeros((6, 9), np.int32)
    progress.start[:] = np.arange(6)
    own_tokens, own = up(tokens), device_progress.mapped(progress, up)

    def call():
        append_tokens(own_tokens, own, committed, DECODING)
        advance(own, committed, DECODING, 3)

    def change():
        for field in ("num_accepted", "num_committed", "tokens", "logprobs", "status", "error_row"):
            getattr(committed, field).set(getattr(second, field))

    device_graph.replay(call, change)
    for of_round in (verdict, second):
        append_tokens(tokens, progress, of_round, DECODING)
        advance(progress, of_round, DECODING, 3)
    np.testing.assert_array_equal(down(own_tokens), tokens)
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


def test_bad_tokens():
    for tokens, message in (
        (np.zeros((2, 4)), r"token_ids=float64\[2, 4\], expected a contiguous NumPy array int32\[2, 4\]"),
        (np.zeros((3, 4), np.int32), r"token_ids=int32\[3, 4\], expected .* int32\[2, 4\]"),
        (np.zeros(4, np.int32), r"token_ids=int32\[4\], expected"),
    ):
        with pytest.raises(ValueError, match=message):
            append_tokens(tokens, *device_progress.make(0, 2, 3), FIRST)
    with pytest.raises(ValueError, match="phase=0, expected FIRST"):
        append_tokens(np.zeros((2, 4), np.int32), *device_progress.make(0, 2, 3), IDLE)


@pytest.mark.parametrize("kernel", [advance_kernel(), append_kernel()], ids=["advance", "append"])
def test_the_kernels_keep_nothing_in_local_memory(kernel):
    facts = analyse(compile_ptx(kernel.function, tuple(kernel.signature.args)))
    assert facts.num_f64 == facts.num_local == facts.stack_bytes == facts.spill_bytes == 0
    assert facts.registers <= 40
