"""What the scaling benchmark counts, on jobs written by hand; and the whole of it on two workers without GPUs."""

import json

import numpy as np
import pytest

from benchmarks.scaling import compare, main, steady_rate, visible_gpus
from pipeline import Rollouts, SamplingParams
from tests import pipes


def journal(path, entries):
    """entries: (worker, started, seconds, tokens)"""
    lines = [
        {"worker": worker, "started": started, "seconds": seconds, "summary": {"num_tokens": tokens}}
        for worker, started, seconds, tokens in entries
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_worker_s_first_shard_is_not_counted(tmp_path):
    alone = [("a", 0, 50, 1000), ("a", 50, 10, 1000), ("a", 60, 10, 1200)]
    assert steady_rate(journal(tmp_path / "one", alone), 1) == pytest.approx(2200 / 20)
    both = [*alone, ("b", 5, 47, 900), ("b", 52, 9, 1000), ("b", 61, 11, 1300)]  # ends at 72
    assert steady_rate(journal(tmp_path / "two", both[::-1]), 2) == pytest.approx(4500 / 22)
    with pytest.raises(AssertionError, match="2 of 3 workers"):
        steady_rate(tmp_path / "two", 3)


def test_samples_with_other_tokens_are_counted(tmp_path):
    rollouts = pipes.pipe().generate([[1], [2], [3]], SamplingParams(max_new_tokens=3, ignore_eos=True, seed=0))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for folder in ("one", "two"):
        rollouts.to_parquet(tmp_path / folder / "rollouts-00000.parquet")
    rollouts.to_parquet(tmp_path / "two" / "rollouts-00001.parquet")  # only the larger job has it
    assert compare(tmp_path / "one", tmp_path / "two") == (3, 0)
    tokens = rollouts[1].token_ids
    changed = Rollouts(rollouts, rollouts.provenance)
    object.__setattr__(changed[1], "token_ids", np.append(tokens[:-1], tokens[-1] ^ 1).astype(np.int32))
    changed.to_parquet(tmp_path / "two" / "rollouts-00000.parquet")
    assert compare(tmp_path / "one", tmp_path / "two") == (3, 1)
    assert compare(tmp_path / "two", tmp_path / "one") == (3, 1)


def test_two_workers_make_the_same_job(tmp_path):
    arguments = [
        *("--target", str(pipes.target_folder()), "--draft", str(pipes.draft_folder()), "--device", "cpu"),
        *("--shards", "3", "--shard-size", "4", "--max-batch", "4", "--tokens", "6", "--vocabulary", "300"),
        *("--results", str(tmp_path)),
    ]
    assert main([*arguments, "--seconds", "500"]) == 0
    figures = json.loads((tmp_path / "scaling.json").read_text())["figures"]
    for count in ("1", "2"):
        job = figures["jobs"][count]
        expected = {"tokens": 72, "missing": 0, "failed_samples": 0, "compared_samples": 12, "different_samples": 0}
        assert job.items() >= expected.items()
        assert figures["ratios"][count]["with_startup"] > 0


def test_a_worker_that_fails_is_said(tmp_path):
    arguments = ["--target", str(tmp_path), "--device", "cpu", "--results", str(tmp_path), "--vocabulary", "9"]
    assert main([*arguments, "--workers", "1"]) == 1
    figures = json.loads((tmp_path / "scaling.json").read_text())["figures"]
    assert "CheckpointError" in figures["errors"]["start"]


def test_a_worker_sees_a_gpu_that_this_process_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]
