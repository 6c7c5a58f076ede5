"""RoundBuffer on any device backend: what comes to the host is what the host twins compute."""

import numpy as np
import pytest

from gpu import RoundBuffer, run_round, top_logprobs
from tests.backends import HOST, assert_same
from tests.rounds import make_round
from tests.rounds import run_round as want_of


def check_rounds(backend, relayed=False):
    """Two rounds through two slots; the first is still there when the second has arrived."""
    first, second = (make_round(seed, 4, 3, 300, "float32") for seed in (60, 61))
    buffer, sent = RoundBuffer(4, 3, room=4 * 3 * 300, top=5, relayed=relayed), []
    for slot, round_ in enumerate((first, second)):
        up = backend.to_device
        records = run_round(
            up(round_.logits), *map(up, round_.parameters), up(round_.drafts), up(round_.num_drafts),
            *map(up, round_.coins), up(round_.wanted), 200, capacity=40, out=(None, *buffer.out),
        )  # fmt: skip
        assert records[2].token_ids is buffer.out[1].token_ids
        rows = np.arange(12)
        top_logprobs(up(round_.logits), records[0], 5, up(rows), out=buffer.top)
        buffer.send(slot)
        exact = HOST.select_support(round_.rows, *round_.parameters, capacity=40)
        tops = top_logprobs(round_.logits, exact, 5, rows)
        sent.append((want_of(HOST, round_, "top_k_first", 40, 200)[1:], tops))
    for slot, (want, tops) in enumerate(sent):
        for got, expected in zip(buffer.receive(slot), want, strict=True):
            assert_same(got, expected)
        for got, expected in zip(buffer.receive_top(slot), tops, strict=True):
            np.testing.assert_array_equal(got, expected)


def check_room(backend):
    """Masks that don't fit are refused by the size that they need, and a larger buffer takes them."""
    round_ = make_round(62, 4, 3, 300, "float32", num_poisoned=0, greedy=0)
    round_.parameters[0][:], round_.parameters[1][:], round_.parameters[2][:] = 1, 0, 1
    round_.wanted[:] = True
    up = backend.to_device
    arguments = (
        up(round_.logits), *map(up, round_.parameters), up(round_.drafts), up(round_.num_drafts),
        *map(up, round_.coins), up(round_.wanted), 300,
    )  # fmt: skip
    want = want_of(HOST, round_, "top_k_first", 300, 300)[2]
    needed = int(want.offsets[-1])
    for room in (needed - 1, needed):
        buffer = RoundBuffer(4, 3, room=room, num_slots=1)
        run_round(*arguments, capacity=300, out=(None, *buffer.out))
        buffer.send()
        if room < needed:
            with pytest.raises(ValueError, match=f"room={room}, expected at least {needed} entries"):
                buffer.receive()
        else:
            assert_same(buffer.receive()[1], want)


def check_sizes():
    """No buffer of nothing."""
    for name in ("batch", "width", "room", "num_slots"):
        sizes = {"batch": 1, "width": 1, "room": 1, "num_slots": 1, name: 0}
        with pytest.raises(ValueError, match=f"{name}=0, expected at least 1"):
            RoundBuffer(**sizes)
