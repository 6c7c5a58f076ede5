"""The engine's slots: whole ones written in one go, read field by field."""

import numpy as np
import pytest
import torch

import gpu
from pipeline.engine.slots import Slot, Slots

FIELDS = ("anchors", "starts", "generated", "seeds", "phases", "num_drafts", "wanted")
EMPTY = Slot()


def a_slot(i):
    return Slot(
        phase=gpu.DECODING, anchor=2**40 + i, start=10 + i, generated=i, remaining=90 - i, seed=2**64 - 1 - i,
        num_drafts=i % 3, temperature=0.5 + i, top_k=2**20 + i, top_p=0.25 + i / 64, min_p=i / 128, wanted=i % 2 == 1,
    )  # fmt: skip


def held(slots, width):
    """Every field of every slot, as kernels would read them."""
    number = slots.num_slots
    columns = {name: getattr(slots, name)(number).tolist() for name in FIELDS}
    columns["remaining"] = slots.progress(number).remaining.tolist()
    for rows in {1, max(width - 1, 1), width}:
        for name, column in zip(("temperature", "top_k", "top_p", "min_p"), slots.policy(number, rows), strict=True):
            assert column.is_contiguous()
            columns[name, rows] = column.view(number, rows).tolist()
    return [{name: column[i] for name, column in columns.items()} for i in range(number)]


def expected(slot, width):
    policy = {"temperature": slot.temperature, "top_k": slot.top_k, "top_p": slot.top_p, "min_p": slot.min_p}
    return {
        "anchors": slot.anchor, "starts": slot.start, "generated": slot.generated, "remaining": slot.remaining,
        "seeds": int(np.uint64(slot.seed).view(np.int64)), "phases": slot.phase, "num_drafts": slot.num_drafts,
        "wanted": slot.wanted,
        **{
            (name, rows): [int(value) if name == "top_k" else float(np.float32(value))] * rows
            for name, value in policy.items() for rows in {1, max(width - 1, 1), width}
        },
    }  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("number", [1, 5])
def test_slots_hold_what_was_written_and_moved(number, width):
    slots, stand = Slots(number, width, torch.device("cpu")), [EMPTY] * number
    assert held(slots, width) == [expected(slot, width) for slot in stand]
    for written in ({number - 1: a_slot(3)}, {i: a_slot(i) for i in reversed(range(number))}, {}, {0: EMPTY}):
        slots.write(written)
        stand = [written.get(i, slot) for i, slot in enumerate(stand)]
        assert held(slots, width) == [expected(slot, width) for slot in stand]
    slots.move(number - 1, 0)
    stand[0] = stand[-1]
    assert held(slots, width) == [expected(slot, width) for slot in stand]
