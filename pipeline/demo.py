"""``python -m pipeline.demo``: the demo target, ordinary and with its drafts, with masks; a table and Parquet files."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from model_loaders import find_draft, load_draft, load_target
from model_loaders.drafts.finding import DEMO_DRAFTS
from pipeline import Rollouts, SamplingParams, SpeculativePipeline

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "A baker sells 12 loaves an hour. How many does he sell in 7 hours? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
    "Give me a short recipe for pancakes.",
    "Write a polite e-mail asking to move a meeting to Thursday.",
    "What is the difference between a list and a tuple in Python?",
    "If x + 3 = 10, what is 2x? Show your work.",
)


def main() -> None:
    """Parse the options, run all arms on the same prompts and seeds, print and write."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", nargs="*", default=list(DEMO_DRAFTS), help="one arm each, beside ordinary")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()

    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    policies = {
        "greedy": SamplingParams(temperature=0, max_new_tokens=options.max_new_tokens, return_sampling_mask=True),
        "sampled": SamplingParams(
            temperature=0.8,
            top_k=64,
            top_p=0.95,
            seed=0,
            max_new_tokens=options.max_new_tokens,
            return_sampling_mask=True,
            sampling_logprobs="support",
        ),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    lines = []
    drafts = [find_draft(name) for name in options.draft]  # before the target, which takes longer
    target = load_target(options.target, device=options.device)
    for draft in (None, *drafts):
        drafting = None if draft is None else load_draft(draft, target)
        pipe = SpeculativePipeline(target, drafting, max_batch=options.max_batch, max_length=2048)
        name = pipe.capabilities.method or "ordinary"
        for policy, params in policies.items():
            print(f"{name}, {policy}:", flush=True)
            pipe.generate(prompts[: options.max_batch], replace(params, max_new_tokens=8))  # compiles what it needs
            started = time.perf_counter()
            rollouts = pipe.generate(prompts, params, progress=True)
            seconds = time.perf_counter() - started
            path = rollouts.to_parquet(options.output / f"{name}-{policy}.parquet")
            lines.append((name, policy, *_figures(rollouts, seconds), str(path)))
    print(f"\n{QUESTIONS[0]}\n{rollouts[0].text}\n")
    _print_table(
        ("method", "policy", "tokens", "tokens/s", "tokens/round", "mean support", "largest", "masks", "written to"),
        lines,
    )


def _figures(rollouts: Rollouts, seconds: float) -> tuple[str, ...]:
    tokens = sum(len(r.token_ids) for r in rollouts)
    # The first token of a rollout comes from its prefill, not from a round.
    rounds = sum(r.num_rounds - 1 for r in rollouts)
    masks = [r.sampling_mask for r in rollouts if r.sampling_mask is not None]
    sizes = np.concatenate([mask.sizes for mask in masks])
    return (
        str(tokens),
        f"{tokens / seconds:.1f}",
        f"{(tokens - len(rollouts)) / max(rounds, 1):.2f}",
        f"{sizes.mean():.1f}",
        str(sizes.max()),
        f"{len(sizes)} of {tokens}",
    )


def _print_table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in (head, *lines)) for i in range(len(head))]
    for row in (head, *lines):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
