"""The acceptance benchmark on a tiny pair: its counts are the rollouts', its tables hold every arm."""

import json

import numpy as np
import pytest

from benchmarks.acceptance import accepted_drafts, line, measure, table
from benchmarks.prompts import first_turns
from pipeline import SamplingParams
from tests import pipes


def test_first_turns_of_both_kinds_of_file(tmp_path):
    turns, plain = tmp_path / "turns.jsonl", tmp_path / "plain.jsonl"
    turns.write_text("".join(json.dumps({"turns": [f"question {i}", "and then?"]}) + "\n" for i in range(3)))
    plain.write_text('{"prompt": "one"}\n{"token_ids": [1, 2]}\n')
    assert first_turns(turns, 2) == [[{"role": "user", "content": f"question {i}"}] for i in range(2)]
    assert first_turns(plain, 5) == ["one", [1, 2]]


def test_the_first_token_is_no_round():
    pipe = pipes.pipe()
    rollouts = pipe.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True))
    accepted = accepted_drafts(rollouts)
    assert accepted.size == sum(rollout.num_rounds - 1 for rollout in rollouts)
    assert accepted.sum() == sum(rollout.num_accepted.sum() for rollout in rollouts)
    assert accepted_drafts([]).size == 0


@pytest.mark.parametrize(("temperature", "proposal"), [(0.0, "argmax"), (1.0, "sample")])
def test_an_arm(temperature, proposal, monkeypatch):
    pipe = pipes.pipe()
    monkeypatch.setattr("benchmarks.acceptance.load_draft", lambda name, target: pipe.state.draft)
    params = SamplingParams(temperature=temperature, max_new_tokens=12, ignore_eos=True, seed=1)
    sets = {"a": [[1, 2, 3]], "b": [[4, 5], [6, 7, 8]]}
    figures = measure(pipe.state.target, "tiny", proposal, sets, params, 4)
    assert figures["mean"] == pytest.approx(np.mean(list(figures["tokens_a_round"].values())), abs=1e-3)
    assert all(1 <= figure <= 1 + pipe.state.draft.num_drafts for figure in figures["tokens_a_round"].values())
    shares = figures["first_k_accepted"]
    assert len(shares) == pipe.state.draft.num_drafts
    assert shares == sorted(shares, reverse=True)
    arm = {"draft": "tiny", "temperature": temperature, "proposal": proposal} | figures
    assert "tokens a round (a " in line(arm)
    lines = table({"arms": [arm, arm | {"first_k_accepted": shares[:1]}]}).splitlines()
    assert len({text.count("|") for text in lines[:4]}) == 1
    assert len({text.count("|") for text in lines[5:]}) == 1
