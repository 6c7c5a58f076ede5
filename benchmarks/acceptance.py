"""Tokens a round of a draft, by data set and by position, counted by the pipeline itself.

    python -m benchmarks.acceptance --prompts gsm8k.jsonl mt-bench.jsonl ... [--draft demo [FOLDER ...]]
                                    [--count 20] [--tokens 128] [--temperatures 0 1] [--top-k K] [--top-p P]
                                    [--seconds S]
    python -m benchmarks.acceptance --table [--into FILE]

A prompt file has a JSON object a line: {"turns": [first turn, ...]} or whatever `python -m pipeline generate` reads.
The first turn is asked through the chat template. Each draft is run greedily and at the other temperatures, its drafts
chosen (argmax) and drawn (sample) where it can do both. Tokens a round are drafts accepted plus the bonus token, over
all rounds of a set; the mean is of the sets. Position k: the share of rounds that accept the first k drafts.
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
    parser.add_argument("--table", action="store_true", help="print the tables of the results instead")
    parser.add_argument("--into", type=Path, metavar="FILE", help="with --table: put them between FILE's markers")
    options = parser.parse_args()
    if options.table:
        tables = table(json.loads((RESULTS / f"{NAME}.json").read_text())["figures"])
        insert_into(options.into, NAME, tables) if options.into else print(tables)
        return
    if not options.prompts:
        parser.error("--prompts is missing: the files of prompts to measure on")
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
                write(NAME, figures)
    print(f"written to {write(NAME, figures)}; not run: {figures['not_run']}; failed: {list(figures['errors'])}")
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
    per_set, reached, num_rounds = {}, np.zeros(draft.num_drafts), 0
    for label, prompts in sets.items():
        # Of one seed, all prompts would be accepted or rejected by the same coins.
        seeded = [replace(params, seed=seed) for seed in range(len(prompts))]
        accepted = accepted_drafts(pipe.generate(prompts, seeded))
        per_set[label] = round(1 + float(accepted.mean()), 3)
        reached += (accepted[:, None] > np.arange(draft.num_drafts)).sum(0)
        num_rounds += accepted.size
    return {
        "tokens_a_round": per_set,
        "mean": round(float(np.mean(list(per_set.values()))), 3),
        "first_k_accepted": [round(float(share), 4) for share in reached / num_rounds],
        "rounds": num_rounds,
    }


def accepted_drafts(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Drafts accepted in every round of all rollouts, int64 [rounds]; the first token's round has no drafts."""
    rounds = [rollout.num_accepted[1:] for rollout in rollouts if rollout.error is None]
    return np.concatenate([np.empty(0, np.int64), *rounds]).astype(np.int64)


def line(arm: dict[str, Any]) -> str:
    """One arm for the eye."""
    per_set = ", ".join(f"{label} {figure:.2f}" for label, figure in arm["tokens_a_round"].items())
    return f"{arm['draft']}, T={arm['temperature']:g}, {arm['proposal']}: {arm['mean']:.2f} tokens a round ({per_set})"


def table(figures: dict[str, Any]) -> str:
    """Both Markdown tables: by set, and by position."""
    arms = figures["arms"]
    labels = list(arms[0]["tokens_a_round"])
    rows = [f"| tokens a round | {' | '.join(labels)} | mean |", "|---|" + "---|" * (len(labels) + 1)]
    for arm in arms:
        cells = [f"{arm['tokens_a_round'][label]:.2f}" for label in labels]
        rows.append(f"| {title(arm)} | {' | '.join(cells)} | {arm['mean']:.2f} |")
    longest = max(len(arm["first_k_accepted"]) for arm in arms)
    rows += ["", f"| first k drafts accepted | {' | '.join(str(k + 1) for k in range(longest))} |"]
    rows.append("|---|" + "---|" * longest)
    for arm in arms:
        cells = [f"{share:.0%}" for share in arm["first_k_accepted"]] + [""] * (longest - len(arm["first_k_accepted"]))
        rows.append(f"| {title(arm)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def title(arm: dict[str, Any]) -> str:
    """What an arm's rows are called."""
    how = "greedy" if arm["temperature"] == 0 else f"T={arm['temperature']:g}, {arm['proposal']}"
    return f"{arm['draft']}, {how}"


if __name__ == "__main__":
    main()
