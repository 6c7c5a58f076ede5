"""Tokens a round of a draft, by data set and by position, counted by the pipeline itself.

    python -m benchmarks.acceptance --prompts gsm8k.jsonl mt-bench.jsonl ... [--draft demo [FOLDER ...]]
                                    [--count 20] [--tokens 128] [--temperatures 0 1] [--top-k K] [--top-p P]
                                    [--seconds S] [--results FOLDER]
    python -m benchmarks.acceptance --table [--into FILE] [--results FOLDER]

A prompt file has a JSON object a line: {"turns": [first turn, ...]} or whatever `python -m pipeline generate` reads.
The first turn is asked through the chat template. Each draft is run greedily and at the other temperatures, its drafts
chosen (argmax) and drawn (sample) where it can do both. Tokens a round are drafts accepted plus the bonus token, over
all rounds of a set; the mean is of the sets. Position k: the share of rounds that accept the first k drafts, of each
set and of all sets together. The figures go to acceptance.json in --results, by default benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prompts import first_turns
from benchmarks.report import RESULTS, insert_into, write
from model_loaders import Target, load_draft, load_target
from pipeline import Rollout, SamplingParams, SpeculativePipeline
from pipeline.prompts import Prompted

NAME = "acceptance"


def main() -> None:
    """Measure every draft on every set, or print the tables of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", nargs="+", default=["demo"])
    parser.add_argument("--count", type=int, default=20, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each prompt, at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no arm after this long")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="of acceptance.json")
    parser.add_argument("--table", action="store_true", help="print the tables of the results instead")
    parser.add_argument("--into", type=Path, metavar="FILE", help="with --table: put them between FILE's markers")
    options = parser.parse_args()
    if options.table:
        tables = table(measured(options.results / f"{NAME}.json"))
        insert_into(options.into, NAME, tables) if options.into else print(tables)
        return
    if not options.prompts:
        parser.error("--prompts is missing: the files of prompts to measure on")
    options.results.mkdir(parents=True, exist_ok=True)
    sets = {path.stem: first_turns(path, options.count) for path in options.prompts}
    target = load_target(options.target, device=options.device)
    arms: list[dict[str, Any]] = []
    figures = {
        "target": options.target,
        "prompts_a_set": options.count,
        "tokens_a_prompt": options.tokens,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "arms": arms,
        "errors": {},
        "not_run": [],
    }
    deadline = time.monotonic() + options.seconds
    for name in options.draft:
        for temperature in options.temperatures:
            for proposal in ("argmax", "sample") if temperature else ("argmax",):
                arm = {"draft": name, "temperature": temperature, "proposal": proposal}
                label = f"{name}, T={temperature:g}, {proposal}"
                if time.monotonic() > deadline:
                    figures["not_run"].append(label)
                    continue
                try:
                    found = measure(target, name, proposal, sets, sampling(options, temperature), options.batch)
                except Exception as error:  # the other arms go on
                    traceback.print_exc()
                    figures["errors"][label] = f"{type(error).__name__}: {error}"
                else:
                    arms.append(arm | found)
                    print(line(arms[-1]), flush=True)
                write(NAME, figures, options.results)
    path = write(NAME, figures, options.results)
    print(f"written to {path}; not run: {figures['not_run']}; failed: {list(figures['errors'])}")
    if figures["errors"]:
        raise SystemExit(1)


def sampling(options: argparse.Namespace, temperature: float) -> SamplingParams:
    """What is asked of every prompt."""
    return SamplingParams(
        temperature=temperature,
        top_k=options.top_k if temperature else None,
        top_p=options.top_p if temperature else 1.0,
        max_new_tokens=options.tokens,
    )


def measure(
    target: Target, name: str, proposal: str, sets: dict[str, list[Prompted]], params: SamplingParams, batch: int
) -> dict[str, Any]:
    """The figures of one draft at one temperature."""
    draft = load_draft(name, target)
    pipe = SpeculativePipeline(target, draft, max_batch=batch, proposal=proposal)
    accepted = {}
    for label, prompts in sets.items():
        # Of one seed, all prompts would be accepted or rejected by the same coins.
        seeded = [replace(params, seed=seed) for seed in range(len(prompts))]
        accepted[label] = accepted_drafts(pipe.generate(prompts, seeded))
    per_set = {label: round(1 + float(counts.mean()), 3) for label, counts in accepted.items()}
    everything = np.concatenate(list(accepted.values()))
    return {
        "tokens_a_round": per_set,
        "mean": round(float(np.mean(list(per_set.values()))), 3),
        "first_k_accepted": shares(everything, draft.num_drafts),
        "first_k_accepted_by_set": {label: shares(counts, draft.num_drafts) for label, counts in accepted.items()},
        "rounds": everything.size,
        "rounds_by_set": {label: counts.size for label, counts in accepted.items()},
    }


def shares(accepted: np.ndarray, num_drafts: int) -> list[float]:
    """The share of rounds that accept the first k drafts, k = 1 to num_drafts; accepted int64 [rounds]."""
    return [round(float((accepted >= k).mean()), 4) for k in range(1, num_drafts + 1)]


def accepted_drafts(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Drafts accepted in every round of all rollouts, int64 [rounds]; the first token's round has no drafts."""
    rounds = [rollout.num_accepted[1:] for rollout in rollouts if rollout.error is None]
    return np.concatenate([np.empty(0, np.int64), *rounds]).astype(np.int64)


def line(arm: dict[str, Any]) -> str:
    """One arm for the eye."""
    per_set = ", ".join(f"{label} {figure:.2f}" for label, figure in arm["tokens_a_round"].items())
    return f"{arm['draft']}, T={arm['temperature']:g}, {arm['proposal']}: {arm['mean']:.2f} tokens a round ({per_set})"


def measured(path: Path) -> dict[str, Any]:
    """The figures of a results file. ValueError if they have no arms, or arms without figures by set."""
    figures = json.loads(path.read_text())["figures"]
    if not figures["arms"] or any("first_k_accepted_by_set" not in arm for arm in figures["arms"]):
        raise ValueError(
            f"{path}: arms without first_k_accepted_by_set, or none; expected figures by set: measure anew"
        )
    return figures


def table(figures: dict[str, Any]) -> str:
    """The Markdown tables: tokens a round by set, then by position of each set and of all."""
    arms = figures["arms"]
    labels = list(arms[0]["tokens_a_round"])
    rows = [f"| tokens a round | {' | '.join(labels)} | mean |", "|---|" + "---|" * (len(labels) + 1)]
    for arm in arms:
        cells = [f"{arm['tokens_a_round'][label]:.2f}" for label in labels]
        rows.append(f"| {title(arm)} | {' | '.join(cells)} | {arm['mean']:.2f} |")
    longest = max(len(arm["first_k_accepted"]) for arm in arms)
    rows += ["", f"| first k drafts accepted | set | {' | '.join(str(k + 1) for k in range(longest))} | rounds |"]
    rows.append("|---|---|" + "---|" * (longest + 1))
    for arm in arms:
        by_set = [(label, arm["first_k_accepted_by_set"][label], arm["rounds_by_set"][label]) for label in labels]
        for label, first_k, rounds in (*by_set, ("all", arm["first_k_accepted"], arm["rounds"])):
            cells = [f"{share:.0%}" for share in first_k] + [""] * (longest - len(first_k))
            rows.append(f"| {title(arm)} | {label} | {' | '.join(cells)} | {rounds} |")
    return "\n".join(rows)


def title(arm: dict[str, Any]) -> str:
    """What an arm's rows are called."""
    how = "greedy" if arm["temperature"] == 0 else f"T={arm['temperature']:g}, {arm['proposal']}"
    return f"{arm['draft']}, {how}"


if __name__ == "__main__":
    main()
