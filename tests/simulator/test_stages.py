"""Stages over the kernels of a device, in the simulator: what an eager round on CUDA does, without CUDA."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import gpu.adjust.device
import gpu.adjust.restrict_device
import gpu.top_tokens.device
import pipeline.stages.adjust
from gpu.device.memory import SimulatedArray
from pipeline.arrays import array_of
from pipeline.batch.held import held
from tests import device_stages
from tests.simulator.backend import Simulated

FACTORIES = (
    (gpu.adjust.device, "adjust_kernel"),
    (gpu.adjust.restrict_device, "restrict_kernel"),
    (gpu.top_tokens.device, "top_kernel"),
)


@pytest.fixture
def device(monkeypatch):
    for module, name in FACTORIES:
        monkeypatch.setattr(module, name, partial(getattr(module, name), threads=64))
    moved = []

    def move(block):
        moved.append(True)
        law = held(block.proposal, "draft_probs")
        return replace(block, proposal=replace(block.proposal, draft_probs=Simulated().to_device(law)))

    def seen_as(tensor):
        array = array_of(tensor)
        return array.view(SimulatedArray) if moved else array

    monkeypatch.setattr(pipeline.stages.adjust, "array_of", seen_as)
    with Simulated(threads=64).patched():
        yield move


@pytest.mark.parametrize(
    ("policy", "dtype", "drawn"),
    [("all of it", torch.float32, "by logits"), ("grammars alone", torch.bfloat16, True)],
)
def test_stages_are_the_hosts(device, policy, dtype, drawn):
    device_stages.check(device, policy, dtype, drawn, vocabulary=41)
