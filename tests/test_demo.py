"""The demo on a tiny pair: what it prints is what the rollouts hold, and the files are beside it."""

import itertools

import pytest

from pipeline import Rollouts, SamplingParams
from pipeline.demo import QUESTIONS, _figures, _print_table, main
from tests import pipes

HEAD = ["method", "policy", "tokens", "tokens/s", "tokens/round", "mean support", "largest", "masks", "written to"]


@pytest.mark.parametrize("speculative", [False, True])
def test_the_figures_are_the_rollouts(speculative):
    params = SamplingParams(
        temperature=0.8, top_k=20, seed=0, max_new_tokens=9, ignore_eos=True, return_sampling_mask=True
    )
    rollouts = pipes.pipe(speculative).generate([[1, 2, 3], [4, 5], [6]], params)
    tokens, speed, a_round, mean, largest, masks = _figures(rollouts, 4.0)
    sizes = [size for rollout in rollouts for size in rollout.sampling_mask.sizes.tolist()]
    assert (tokens, speed, masks) == ("27", "6.8", "27 of 27")
    assert (mean, largest) == (f"{sum(sizes) / 27:.1f}", str(max(sizes)))
    rounds = sum(rollout.num_rounds - 1 for rollout in rollouts)
    assert a_round == f"{24 / rounds:.2f}"
    if not speculative:  # a token a round
        assert a_round == "1.00"


def test_the_tables_columns_are_as_wide_as_their_longest_cell(capsys):
    _print_table(("a", "long head", "c"), [("longer", "1", ""), ("2", "3", "last")])
    assert capsys.readouterr().out.split("\n") == [
        "a       long head  c", "longer  1", "2       3          last", ""
    ]  # fmt: skip


def test_the_demo_shows_ordinary_and_its_drafts_side_by_side(tmp_path, monkeypatch, capsys):
    pair = ["--target", str(pipes.target_folder()), "--draft", str(pipes.draft_folder()), "--device", "cpu"]
    output = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["demo", *pair, "--max-new-tokens", "5", "--output", str(output)])
    main()
    shown = capsys.readouterr().out.splitlines()
    begin = next(number for number, line in enumerate(shown) if line.startswith("method "))
    starts = [shown[begin].index(name) for name in HEAD]
    rows = [[row[i:j].strip() for i, j in itertools.pairwise([*starts, None])] for row in shown[begin:]]
    assert rows[0] == HEAD
    names = [(method, policy) for method in ("ordinary", "dflash") for policy in ("greedy", "sampled")]
    assert [(row[0], row[1]) for row in rows[1:]] == names
    assert QUESTIONS[0] in shown
    for (method, policy), row in zip(names, rows[1:], strict=True):
        rollouts = Rollouts.from_parquet(output / f"{method}-{policy}.parquet")
        assert len(rollouts) == len(QUESTIONS)
        assert row[8] == str(output / f"{method}-{policy}.parquet")
        again = _figures(rollouts, 1.0)
        assert [row[2], *row[4:8]] == [again[0], *again[2:]]
        assert float(row[3]) > 0
        if policy == "greedy":
            assert (row[5], row[6]) == ("1.0", "1")
        if method == "ordinary":
            assert row[4] == "1.00"
