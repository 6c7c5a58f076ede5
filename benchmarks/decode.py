"""Tokens a second of the demo model: specmask's ordinary and speculative decoding beside transformers' generate.

    python -m benchmarks.decode [--target demo] [--draft demo demo-dflash] [--tokens 128] [--repeats 5] [--device auto]
                               [--results FOLDER]

The arms alternate within a repeat, so a slow spell of the machine hits all of them; the median of the repeats counts.
All are greedy unless they say otherwise, with EOS ignored, on the same eight prompts: at batch 8 together, at batch 1
one after another, because a draft's tokens a round differ from 1.3 to 6 between them. Batches of transformers' generate
are of one prompt, so that nothing is padded.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import RESULTS, write
from model_loaders import Target, load_draft, load_target
from model_loaders.targets.demo import demo_target_folder
from pipeline import SamplingParams, SpeculativePipeline
from pipeline.demo import QUESTIONS


def main() -> None:
    """Measure every arm, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument(
        "--draft", nargs="+", default=["demo", "demo-dflash"], help="one or several, each by its method"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args()

    target = load_target(options.target, device=options.device)
    drafts = {draft.method: draft for draft in (load_draft(name, target) for name in options.draft)}
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_new_tokens=options.tokens, ignore_eos=True)
    masked = SamplingParams(temperature=1.0, top_k=64, top_p=0.95, max_new_tokens=options.tokens, ignore_eos=True)
    recorded = dataclasses.replace(masked, return_sampling_mask=True, sampling_logprobs="support")
    arms: dict[str, Callable[[], float]] = {
        "transformers generate, batch 1": transformers_rate(options.target, target, prompts, options.tokens)
    }
    for setting, policy, batch in (
        ("batch 1", params, 1),
        ("batch 8", params, 8),
        ("batch 8, sampled", masked, 8),
        ("batch 8, sampled, masks", recorded, 8),
    ):
        for method, draft in {"ordinary": None, **drafts}.items():
            arms[f"specmask {method}, {setting}"] = specmask_rate(target, draft, prompts, policy, batch)
    for run in arms.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(options.repeats):
        for name, run in arms.items():
            rates[name].append(run())
    medians = {name: statistics.median(values) for name, values in rates.items()}
    base = medians["transformers generate, batch 1"]
    print(f"\n{'tokens a second, median':48}{'rate':>8}{'x generate':>12}")
    for name, rate in medians.items():
        print(f"{name:48}{rate:8.1f}{rate / base:12.2f}")
    write(
        "decode",
        {
            "target": options.target,
            "drafts": {method: draft.sha256 for method, draft in drafts.items()},
            "dtype": str(target.dtype),
            "device": str(target.device),
            "tokens": options.tokens,
            "tokens_per_second": rates,
            "median": medians,
        },
        options.results,
    )


def transformers_rate(name: str, target: Target, prompts, tokens: int) -> Callable[[], float]:
    """The same of `model.generate`, one prompt after another, on a model loaded as its users load it."""
    source = demo_target_folder() if name == "demo" else name
    model = AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype).to(target.device).eval()

    def run() -> float:
        started, made = time.perf_counter(), 0
        for prompt in prompts:
            ids = torch.tensor([target.render_chat(prompt)], device=target.device)
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
            made += out.shape[1] - ids.shape[1]
        return made / (time.perf_counter() - started)

    return run


def specmask_rate(target: Target, draft, prompts, params: SamplingParams, max_batch: int) -> Callable[[], float]:
    """A function that generates once and returns tokens a second, prefill included."""
    pipe = SpeculativePipeline(target, draft, max_batch=max_batch, max_length=1024)

    def run() -> float:
        started = time.perf_counter()
        seeded = [dataclasses.replace(params, seed=seed) for seed in range(len(prompts))]
        rollouts = pipe.generate(prompts, seeded)
        return sum(len(r.token_ids) for r in rollouts) / (time.perf_counter() - started)

    return run


if __name__ == "__main__":
    main()
