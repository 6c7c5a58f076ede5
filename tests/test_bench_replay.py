"""benchmarks/replay on CUDA: both ways compute the same from both starts, and the table says what was measured."""

import itertools
import json

import numpy as np
import pytest
import torch

from benchmarks import replay_cuda
from benchmarks.report import write
from pipeline import SamplingMask
from tests import naive_trainer


def a_case(device):
    rng = np.random.default_rng(4)
    ids = np.stack([np.sort(rng.choice(97, 12, replace=False)) for _ in range(5)]).astype(np.int32)
    mask = SamplingMask(ids.ravel(), np.arange(6) * 12, np.full(5, -1, np.float32), "selected")
    logits = torch.tensor(rng.normal(size=(5, 97)), dtype=torch.float32, device=device).requires_grad_()
    return logits, mask, ids[np.arange(5), rng.integers(0, 12, 5)]


def test_every_way_gives_the_oracles_log_probabilities():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, mask, taken = a_case(device)
    x = logits.detach().cpu().numpy()
    expected = [naive_trainer.log_softmax(x[i], 1.0, mask[i])[taken[i]] for i in range(5)]
    for way, start in itertools.product(replay_cuda.WAYS, replay_cuda.STARTS):
        got = replay_cuda.prepare(way, start, mask, taken, 97)(logits)
        np.testing.assert_allclose(got.detach().cpu().numpy(), np.array(expected, float), rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_figures():
    figures = replay_cuda.measure(*a_case("cuda"), repeats=2)
    assert set(figures["results"]) == set(replay_cuda.STARTS)
    for ways in figures["results"].values():
        assert set(ways) == set(replay_cuda.WAYS)
    assert max(figures["largest_difference"].values()) <= 1e-6


def test_the_table_says_what_was_measured(tmp_path):
    def one(total, memory):
        fields = {"total_ms": total, "forward_ms": total / 4, "backward_ms": total * 3 / 4, "runs": 3}
        return fields | {"extra_mb": 2500.0 + memory, "extra_mb_without_the_gradient": memory}

    results = {start: {"specmask": one(2.0, 30.0), "torch": one(12.0, 4000.0)} for start in replay_cuda.STARTS}
    figures = {"work": "4096 x 9", "results": results, "ratios": replay_cuda.ratios(results)}
    text = replay_cuda.table(json.loads(write("replay_cuda", figures, tmp_path).read_text()))
    assert "| specmask, prepared | 0.50 | 1.50 | 2.00 | 2,530 | 30 |" in text.splitlines()
    assert "| torch, from the host | 3.00 | 9.00 | 12.00 | 6,500 | 4,000 |" in text.splitlines()
    assert text.count("6.0 x faster | 0.39 x | 0.007 x |") == 2
