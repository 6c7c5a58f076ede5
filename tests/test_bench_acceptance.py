"""The acceptance benchmark on a tiny pair: its counts are the rollouts', its tables hold every arm."""

import json

import numpy as np
import pytest

from benchmarks.acceptance import accepted_drafts, line, main, measure, measured, shares, table
from benchmarks.prompts import first_turns
from benchmarks.report import RESULTS
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
    assert len(figures["first_k_accepted"]) == pipe.state.draft.num_drafts
    assert sum(figures["rounds_by_set"].values()) == figures["rounds"]
    for label, first_k in (figures["first_k_accepted_by_set"] | {"all": figures["first_k_accepted"]}).items():
        assert first_k == sorted(first_k, reverse=True)
        if label != "all":
            assert 1 + sum(first_k) == pytest.approx(figures["tokens_a_round"][label], abs=2e-3)
    for k, share in enumerate(figures["first_k_accepted"]):
        parts = [figures["first_k_accepted_by_set"][label][k] * figures["rounds_by_set"][label] for label in sets]
        assert share * figures["rounds"] == pytest.approx(sum(parts), abs=0.01)
    arm = {"draft": "tiny", "temperature": temperature, "proposal": proposal} | figures
    assert "tokens a round (a " in line(arm)


def test_shares_by_position():
    assert shares(np.array([0, 2, 2, 3]), 4) == [0.75, 0.75, 0.25, 0.0]


ARM = {
    "draft": "d", "temperature": 0.0, "proposal": "argmax", "tokens_a_round": {"a": 2.5, "b": 1.25}, "mean": 1.875,
    "first_k_accepted": [0.6, 0.3], "first_k_accepted_by_set": {"a": [0.9, 0.6], "b": [0.25, 0.0]},
    "rounds": 30, "rounds_by_set": {"a": 10, "b": 20},
}  # fmt: skip


def test_the_tables_by_set_and_by_position():
    short = ARM | {"temperature": 1.0, "first_k_accepted": [0.5], "first_k_accepted_by_set": {"a": [0.5], "b": [0.5]}}
    assert table({"arms": [ARM, short]}).splitlines() == [
        "| tokens a round | a | b | mean |",
        "|---|---|---|---|",
        "| d, greedy | 2.50 | 1.25 | 1.88 |",
        "| d, T=1, argmax | 2.50 | 1.25 | 1.88 |",
        "",
        "| first k drafts accepted | set | 1 | 2 | rounds |",
        "|---|---|---|---|---|",
        "| d, greedy | a | 90% | 60% | 10 |",
        "| d, greedy | b | 25% | 0% | 20 |",
        "| d, greedy | all | 60% | 30% | 30 |",
        "| d, T=1, argmax | a | 50% |  | 10 |",
        "| d, T=1, argmax | b | 50% |  | 20 |",
        "| d, T=1, argmax | all | 50% |  | 30 |",
    ]


def test_figures_without_sets_are_measured_anew(tmp_path):
    path = tmp_path / "acceptance.json"
    old = {name: value for name, value in ARM.items() if not name.endswith("_by_set")}
    for arms in ([], [ARM, old]):
        path.write_text(json.dumps({"figures": {"arms": arms}}))
        with pytest.raises(ValueError, match=r"acceptance\.json: arms without first_k_accepted_by_set, or none"):
            measured(path)


def test_a_trial_run_writes_its_own_folder(tmp_path, monkeypatch, capsys):
    """The recorded file stays; --table reads the trial's."""
    recorded = (RESULTS / "acceptance.json").read_bytes()
    draft = pipes.draft()
    monkeypatch.setattr("benchmarks.acceptance.load_draft", lambda name, target: draft)
    monkeypatch.setattr("benchmarks.acceptance.load_target", lambda name, device: draft.target)
    prompts = tmp_path / "few.jsonl"
    prompts.write_text('{"token_ids": [1, 2]}\n{"token_ids": [3]}\n')
    results = tmp_path / "new" / "results"
    command = ["acceptance", "--results", str(results)]
    monkeypatch.setattr("sys.argv", [*command, "--prompts", str(prompts), "--tokens", "6"])
    main()
    arms = measured(results / "acceptance.json")["arms"]
    assert [(arm["temperature"], arm["proposal"]) for arm in arms] == [(0, "argmax"), (1, "argmax"), (1, "sample")]
    assert all(arm["rounds_by_set"] == {"few": arm["rounds"]} for arm in arms)
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", [*command, "--table"])
    main()
    assert capsys.readouterr().out == table({"arms": arms}) + "\n"
    assert (RESULTS / "acceptance.json").read_bytes() == recorded
