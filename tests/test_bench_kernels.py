"""benchmarks/kernels: the peers compute what they are said to, and the tables say what was measured."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.kernels import __main__ as command
from benchmarks.kernels import in_flashinfer
from benchmarks.kernels.accuracy import Reference, of_peer
from benchmarks.kernels.cases import LIKELY, SETTINGS, SHAPES, TAIL, WIDTH, Setting, Shape, make_inputs
from benchmarks.kernels.in_flashinfer import FlashInferRound
from benchmarks.kernels.in_torch import TorchRound
from benchmarks.kernels.table import tables
from benchmarks.report import insert, markers, write
from tests import naive

SHAPE = Shape(3, 500, "float32")
PEAKED = Shape(2, 4000, "bfloat16", peaked=True)
FILTERED = [Setting(20, 0.95), Setting(20, 1.0), Setting(500, 0.9)]


def one_hot_verdicts(inputs, setting):
    logits = inputs.logits.double().numpy()
    for b, rows in enumerate(logits):
        policies = [naive.policy(row, 1.0, setting.top_k, float(np.float32(setting.top_p))) for row in rows]
        verdict = naive.verify(
            policies, inputs.drafts[b].numpy(), WIDTH - 1, inputs.accept[b].numpy(), inputs.draw[b].numpy()
        )
        assert not verdict.borderline
        yield verdict


def stand_in():
    """FlashInfer's functions of one row at a time; the coins of a chain are all 0.5, the draw takes the likeliest."""

    def renorm(probs, keep):
        kept = torch.where(keep, probs, 0)
        return kept / kept.sum(-1, keepdim=True)

    def top_k_renorm_probs(probs, top_k):
        assert top_k.dtype == torch.int32
        least = torch.stack([row.topk(int(k)).values[-1] for row, k in zip(probs, top_k, strict=True)])
        return renorm(probs, probs >= least[:, None])

    def top_p_renorm_probs(probs, top_p):
        values, ids = probs.sort(-1, descending=True)
        keep = values.double().cumsum(-1) - values < top_p[:, None]
        return renorm(probs, torch.zeros_like(keep).scatter(-1, ids, keep))

    def chain_speculative_sampling(draft_probs, draft_tokens, target_probs, generator):
        assert draft_tokens.dtype == torch.int32
        generator.set_state(generator.get_state())
        tokens = torch.full(target_probs.shape[:2], -1)
        for b, drafts in enumerate(draft_tokens.tolist()):
            for i, draft in enumerate([*drafts, None]):
                law = target_probs[b, i]
                if draft is not None:
                    if 0.5 * draft_probs[b, i, draft] < law[draft]:
                        tokens[b, i] = draft
                        continue
                    law = (law - draft_probs[b, i]).clamp(min=0)
                tokens[b, i] = law.argmax()
                break
        return tokens, None, None

    return SimpleNamespace(
        top_k_renorm_probs=top_k_renorm_probs,
        top_p_renorm_probs=top_p_renorm_probs,
        chain_speculative_sampling=chain_speculative_sampling,
    )


@pytest.mark.parametrize("setting", [*FILTERED, Setting(0, 0.8), Setting(0, 1.0)], ids=lambda setting: setting.name)
def test_plain_torch_filters_and_verifies_as_the_oracle(setting):
    for seed in range(4):
        inputs = make_inputs(SHAPE, seed, "cpu")
        one = TorchRound(SHAPE, setting, inputs)
        distance = of_peer(Reference(inputs, setting), one)
        assert distance["support_difference"] == 0
        assert distance["l1"] < 1e-5
        tokens, accepted, sizes, _, logprobs = one.run("capture")
        for b, verdict in enumerate(one_hot_verdicts(inputs, setting)):
            assert tokens[b].tolist() == verdict.tokens + [-1] * (WIDTH - len(verdict.tokens))
            assert accepted[b] == verdict.num_accepted
        assert torch.equal(logprobs.isfinite().sum(-1), sizes)


@pytest.mark.parametrize("order", in_flashinfer.ORDERS)
@pytest.mark.parametrize("setting", FILTERED, ids=lambda setting: setting.name)
def test_both_flashinfer_orders_filter_as_the_oracle_and_keep_the_drafts_that_are_to_be_kept(setting, order):
    inputs = make_inputs(SHAPE, 5, "cpu")
    one = FlashInferRound(stand_in(), SHAPE, setting, inputs, order)
    distance = of_peer(Reference(inputs, setting), one)
    assert distance["support_difference"] == 0
    assert distance["l1"] < 1e-5
    tokens, *_, sizes, _, logprobs = one.run("capture")
    for b, verdict in enumerate(one_hot_verdicts(inputs, setting)):
        assert tokens[b, : verdict.num_accepted].tolist() == verdict.tokens[:-1]
        assert (tokens[b] >= 0).sum() == len(verdict.tokens)
    assert torch.equal(logprobs.isfinite().sum(-1), sizes)


def test_the_distance_counts_tokens_on_either_side():
    inputs, setting = make_inputs(SHAPE, 6, "cpu"), Setting(20, 1.0)
    reference = Reference(inputs, setting)
    laws = [one.probs.copy() for one in reference.policies]
    kept = np.flatnonzero(laws[1])[:2]
    laws[1][kept[0]] = 0
    laws[1][np.flatnonzero(laws[1] == 0)[-2:]] = 0.25
    distance = reference.distance(laws)
    assert distance["support_difference"] == 3
    assert distance["l1"] == pytest.approx(0.5 + reference.policies[1].probs[kept[0]], rel=1e-2)


def test_few_tokens_of_a_peaked_row_weigh_almost_all():
    logits = make_inputs(PEAKED, 7, "cpu").logits.double()
    probs = logits.softmax(-1).sort(-1, descending=True).values
    others = probs[..., LIKELY:].sum(-1)
    assert others.min() > TAIL / 3  # the likeliest of the others are among the first too
    assert others.max() < TAIL
    assert ((probs.cumsum(-1) < 0.95).sum(-1) < LIKELY).all()


def test_every_asked_shape_and_setting_is_there():
    asked = {(b, v, d) for b in (1, 8, 32) for v in (151_936, 248_320) for d in ("bfloat16", "float32")}
    flat = [shape for shape in SHAPES if not shape.peaked]
    assert {(shape.batch, shape.vocabulary, shape.dtype) for shape in flat} == asked
    assert len(flat) == len(asked)
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) == len(flat) + 1
    assert {(s.top_k, s.top_p) for s in SETTINGS} == {(k, p) for k in (50, 256, 1024, 0) for p in (0.95, 1.0)}
    assert all(shape.num_sets * shape.logits_bytes >= 120e6 for shape in SHAPES)


def measured(*times, **more):
    names = ("filter", "verify", "capture", "pack")
    return {"graph_us": dict(zip(names, times, strict=False)), "alone_us": 50.0, "eager_us": 60.0} | more


@pytest.fixture
def report(tmp_path):
    shape = {"batch": 32, "vocabulary": 248_320, "dtype": "bfloat16", "floor_us": 30.0}
    cases = [
        shape
        | {"top_k": 1024, "top_p": 0.95, "specmask": measured(40, 41, 42.04, 45), "torch": measured(800, 900, 1000)}
        | {"flashinfer sparse": measured(1000, 1200, 1350), "flashinfer dense": {"error": "out of memory"}},
        shape | {"top_k": 0, "top_p": 1.0, "specmask": measured(33, 36)},
        shape | {"logits": "peaked", "top_k": 0, "top_p": 1.0, "specmask": measured(33, 39)},
        shape | {"dtype": "float32", "top_k": 0, "top_p": 1.0, "specmask": {"error": "RuntimeError: no"}},
    ]
    path = write("kernels", {"copy_bytes_a_second": 4.2e12, "empty_graph_us": 5.5, "cases": cases}, tmp_path)
    return json.loads(path.read_text())


def test_the_tables_say_what_was_measured(report):
    text = tables(report)
    assert "4.20 TB/s" in text
    assert report["commit"] in text
    line = (
        "| 256 x 248,320, 1024, 0.95 | 30.0 | 40.0 | 41.0 | 42.0 | 45.0 | 1.50 | 50.0 | 60.0 | 1,000 | 1,350 | – | 30 |"
    )
    assert line in text.splitlines()
    assert "| 256 x 248,320, bfloat16 | 45.0 (1.5) | 36.0 (1.2) |" in text.splitlines()
    assert "| 256 x 248,320, bfloat16, peaked | – | 39.0 (1.3) |" in text.splitlines()
    assert "| 256 x 248,320, float32 | – | – |" in text.splitlines()


def test_the_command_puts_the_tables_between_the_markers(report, tmp_path, monkeypatch, capsys):
    page, results = tmp_path / "page.md", tmp_path / "kernels.json"
    begin, end = markers("kernels")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["kernels", "--table", "--results", str(results), "--into", str(page)])
    command.main()
    assert page.read_text() == f"before\n{begin}\n{tables(report)}\n{end}\nafter\n"
    monkeypatch.setattr(sys, "argv", ["kernels", "--table", "--results", str(results)])
    command.main()
    assert capsys.readouterr().out == tables(report) + "\n"
    with pytest.raises(ValueError, match="markers"):
        insert("no markers", "kernels", tables(report))
