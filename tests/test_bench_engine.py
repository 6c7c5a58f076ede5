"""What of the engine's benchmark runs without a device: its checks, its comparisons, and the whole of it, small."""

import json
import re

import pytest

from benchmarks.engine import measure
from benchmarks.engine.__main__ import main
from benchmarks.engine.arms import covered, share_of_later_half
from benchmarks.engine.comparisons import ratios, soak
from benchmarks.engine.peers import COMPILED, EAGER, MODES, STATIC
from benchmarks.engine.plan import SETTINGS, WAVES, asked_for, cases
from benchmarks.engine.table import tables
from pipeline import SamplingParams
from pipeline.results.rollout import SamplingMask
from tests import engines, pipes

RIGHT = {"missing": 0, "misaligned": 0, "outside": 0, "unnormalised": 0}


def test_settings_are_policies():
    assert [SamplingParams(**setting).keeps_supports for setting in SETTINGS.values()] == [False, True, True, True]


def test_the_most_asked_for_comes_first():
    planned = cases([8, 1], [1.0, 0.0], list(SETTINGS))
    assert [case.arm("dflash") for case in planned[3:7]] == [
        "dflash, filtered, T=1, batch 8",
        "dflash, off, greedy, batch 8",
        "dflash, top-K 32, greedy, batch 8",
        "dflash, top-K 128, greedy, batch 8",
    ]
    assert [case.batch for case in planned] == 2 * 4 * [8] + 4 * [1]


def test_prompts_of_data_sets_take_turns(tmp_path):
    for name, count in (("a", 2), ("b", 5)):
        lines = [json.dumps({"turns": [f"{name}{i}"]}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    found = asked_for(pipes.target(), 1, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [one[0]["content"] for one in found[:8]] == ["a0", "b0", "a1", "b1", "b2", "b3", "b4", "a0"]
    assert len(found) == WAVES


def test_the_soak_counts_every_mask():
    found = soak(engines.target(), engines.draft("dflash"), 512)
    assert found == {"tokens": 512, "requested": 256, "masks": 256, **RIGHT}


def test_a_soak_that_is_cut_counts_what_ran():
    assert soak(pipes.target(), None, 512, lambda: False) == {"tokens": 0, "requested": 0, "masks": 0, **RIGHT}


def test_a_mask_in_another_place_is_found(monkeypatch):
    """Masks moved by a row: still as many, but with their tokens outside, or with other log-probabilities."""
    for name in ("__getitem__", "row_logprobs"):
        row = getattr(SamplingMask, name)
        monkeypatch.setattr(SamplingMask, name, lambda mask, i, row=row: row(mask, (i + 1) % len(mask)))
    found = soak(pipes.target(), None, 256)
    assert found["masks"] == 256
    assert found["outside"] > 100


def test_what_the_figures_are_held_against():
    rates = {"ordinary": [90.0, 100.0, 400.0], "dflash": [250.0, 240.0, 1.0]}
    arms = {f"{method}, off, T=1, batch 8": {"tokens_per_second": of_it} for method, of_it in rates.items()}
    arms["dspark, off, T=1, batch 8"] = {}  # failed
    peers = {"ordinary, batch 8": [150.0], "dflash, batch 8": [300.0], f"{EAGER}, batch 8": [10.0]}
    peers[f"{COMPILED}, batch 8"] = [40.0, 60.0]
    others = {"unbounded_over_bounded": {"dflash": {"ratio": 0.998}}}
    found = ratios({"arms": arms, "peers": peers, "masks_on_over_off": {"dflash": {"ratio": 0.9995}}} | others)
    assert found == {
        "dflash over ordinary, off, T=1, batch 8": 2.4,
        "ordinary over generate": 15.0,
        "ordinary over generate, static and compiled": 3.0,
        "ordinary over the best mode of generate": 3.0,
        "dflash over generate": 30.0,
        "dflash over generate, static and compiled": 6.0,
        "dflash over the best mode of generate": 6.0,
        "dflash over ordinary, as transformers": 2.0,
        "masks on over off, dflash": 0.9995,
        "masks of top_p alone over bounded ones, dflash": 0.998,
    }


def test_the_share_of_time_in_spans():
    spans = [(0.0, 50.0), (60.0, 70.0), (65.0, 80.0), (90.0, 100.0)]
    assert share_of_later_half(spans) == pytest.approx(30 / 50)
    assert share_of_later_half([*spans, (40.0, 95.0)]) == 1
    assert covered(spans) == 80
    assert covered(spans, 45.0) == 35


def test_the_table_of_what_rounds_cost():
    arm = {"tokens_per_second": [10.0], "tokens_a_round": 1.0, "ms_a_round": 2.0, "host_ms_a_round": 0.25}
    report = {
        "machine": {"gpu": "card", "driver": "1"}, "versions": {"torch": "2", "transformers": "5"}, "date": "today",
        "commit": "c0ffee",
        "figures": {
            "prompts": "some", "target": "demo", "dtype": "torch.bfloat16", "tokens": 5, "peers": {},
            "arms": {
                "ordinary, off, greedy, batch 8": arm | {"in_rounds": 0.987, "kernels_in_rounds": 0.71},
                "dflash, off, greedy, batch 8": arm | {"in_rounds": 0.5},
                "dflash, off, greedy, batch 1": arm,
            },
            "peak_gb": {"ordinary, batch 8": 0.414}, "masks_on_over_off": {}, "unbounded_over_bounded": {}, "soak": {},
        },
    }  # fmt: skip
    lines = tables(report).splitlines()
    assert "| off, greedy, batch 8 | 0.25, 99%, 71% | 0.25, 50% |" in lines
    assert "| peak memory, GB, batch 8 | 0.41 | – |" in lines
    assert not any(line.startswith("| off, greedy, batch 1 | 0.25") for line in lines)


def command(folder, *more):
    return [
        *("--device", "cpu", "--target", str(pipes.target_folder()), "--results", str(folder), "--batches", "2"),
        *("--draft", f"own={pipes.draft_folder()}", "--settings", "off", "top-K 32", "--tokens", "5", "--repeats", "1"),
        *("--peer-batch", "2", "--peer-tokens", "2", "--on-off-rounds", "1", "--on-off-batch", "2"),
        *("--on-off-tokens", "5", "--unbounded-rounds", "1", "--soak", "256", *more),
    ]


def test_the_whole_command_and_a_part_that_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(MODES, STATIC, {"cache_implementation": "no such"})
    assert main(command(tmp_path, "--no-compiled-peer")) == 1
    figures = json.loads((tmp_path / "engine.json").read_text())["figures"]
    assert list(figures["errors"]) == [STATIC]
    assert figures["not_run"] == []
    assert {name: len(sha256) for name, sha256 in figures["drafts"].items()} == {"own": 64}
    assert len(figures["arms"]) == 2 * (2 + 2)
    assert all(arm["tokens_a_round"] >= 1 and arm["ms_a_round"] > 0 for arm in figures["arms"].values())
    for arm in figures["arms"].values():
        [first], [slowest], [behind] = arm["ms_to_first"], arm["ms_of_slowest"], arm["ms_behind_last"]
        assert min(first, slowest, behind) > 0
        assert max(first, slowest) >= arm["ms_a_round"]
    for comparison in ("masks_on_over_off", "unbounded_over_bounded"):
        assert set(figures[comparison]) == {"ordinary", "own"}
    assert 1 <= figures["unbounded_over_bounded"]["own"]["support_mean"] <= pipes.target().vocab_size
    assert figures["soak"] == {"method": "own", "tokens": 256, "requested": 256, "masks": 256, **RIGHT}
    assert {"ordinary over generate", "own over ordinary, as transformers"} <= set(figures["ratios"])
    file = tmp_path / "README.md"
    file.write_text("before\n<!-- engine:begin -->\nold\n<!-- engine:end -->\nbehind\n")
    assert main(["--table", "--results", str(tmp_path), "--into", str(file)]) == 0
    lines = file.read_text().splitlines()
    assert "old" not in lines
    assert "| tokens/s (tokens a round, ms a round) | ordinary | own | own x |" in lines
    row = next(line for line in lines if line.startswith("| top-K 32, T=1, batch 2 |"))
    assert re.fullmatch(r"\| top-K 32, T=1, batch 2 (\| [\d,]+ \(\d\.\d\d, \d+\.\d\d\) ){2}\| \d+\.\d\d \|", row)
    assert any(line.startswith("- Soak, own: 256 tokens, 256 requested, 256 masks, 0 missing") for line in lines)


def test_what_there_is_no_time_for_is_said(tmp_path, monkeypatch):
    """The results of what ran before are there."""
    assert main(command(tmp_path, "--seconds", "-1")) == 0
    figures = json.loads((tmp_path / "engine.json").read_text())["figures"]
    assert figures["not_run"] == ["loading the target"]
    assert figures["arms"] == {}
    monkeypatch.setattr(measure, "PROFILING_SECONDS", 1e6)
    assert main(command(tmp_path, "--no-compiled-peer", "--seconds", "1000")) == 0
    figures = json.loads((tmp_path / "engine.json").read_text())["figures"]
    assert {"soak", EAGER, "masks on and off, own"} <= set(figures["not_run"])
    assert figures["dtype"] == "torch.float32"
