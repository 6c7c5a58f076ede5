"""The replay kernels in the simulator against their host twins."""

import numpy as np
import pytest
import torch

from gpu.device.memory import SimulatedArray
from pipeline import SamplingMask
from pipeline.arrays import array_of
from pipeline.replay import Supports, entries
from tests import device_replay
from tests.simulator.backend import Simulated

SIMULATED = Simulated()


@pytest.mark.parametrize("name", device_replay.CASES)
def test_cases_are_the_hosts(name):
    device_replay.check_case(SIMULATED, name)


def test_out_of_range_values_are_harmless():
    device_replay.check_out_of_range(SIMULATED)


def test_bad_arguments():
    for call, message in device_replay.check_arguments(SIMULATED.up):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_operations(dtype, monkeypatch):
    """Forward and backward in torch, as CUDA tensors take them."""
    logits, ids, offsets, temperature = device_replay.a_case()
    mask = SamplingMask(ids, offsets, np.zeros(4, np.float32), "selected")
    supports = Supports.of(mask, temperature, vocab_size=50, token_ids=ids[offsets[:-1]])

    def run():
        x = torch.tensor(logits).to(dtype).requires_grad_()
        result = supports.replay(x)
        (result.logprobs + result.entropy).sum().backward()
        return result.logprobs, result.entropy, x.grad

    expected, launched = run(), []

    def on_device(tensor):
        launched.append(tensor)
        return array_of(tensor).view(SimulatedArray)

    monkeypatch.setattr(entries, "array_of", on_device)
    for got, want in zip(run(), expected, strict=True):
        assert torch.equal(got, want)
    assert len(launched) == 5 + 3 + 6
