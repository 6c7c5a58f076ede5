"""Masks on against off, the soak, and what the figures are held against."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.engine.arms import ENGINES, Arm
from benchmarks.engine.peers import COMPILED, EAGER, MODES
from benchmarks.engine.plan import ORDINARY, SETTINGS, prompts_for
from model_loaders import Target
from pipeline import SamplingParams, SpeculativePipeline

MASK_COUNTS = ("tokens", "requested", "masks", "missing", "misaligned", "outside", "unnormalised")
_SOAKED_AT_ONCE = 128


def on_over_off(
    target: Target, draft: Any, rounds: int, *, batch: int = 32, tokens: int = 512, **options: Any
) -> dict[str, Any]:
    """Tokens a second with masks and without, sampled with the same parameters, in alternating runs."""
    off = SamplingParams(temperature=1.0, max_new_tokens=tokens, ignore_eos=True, **SETTINGS["off"])
    on = dataclasses.replace(off, return_sampling_mask=True, sampling_logprobs="support")
    pipe = _pipe(target, draft, batch, options)
    off_arm, on_arm = _alternate(pipe, prompts_for(target, batch), (off, on), rounds)
    return _compared(on_arm, off_arm, "on", "off")


def unbounded_over_bounded(
    target: Target, draft: Any, rounds: int, *, batch: int = 32, tokens: int = 512, **options: Any
) -> dict[str, Any]:
    """Tokens a second with masks of top-p alone, and with a top_k of 1,024 beside it, in alternating runs.

    At a temperature of 0.7, where supports are small.
    """
    bounded = SamplingParams(temperature=0.7, max_new_tokens=tokens, ignore_eos=True, **SETTINGS["filtered"])
    unbounded = dataclasses.replace(bounded, top_k=None)
    # Whatever the supports are: none overflows.
    options = options | {"allow_unbounded_support": True, "max_support": target.vocab_size}
    pipe = _pipe(target, draft, batch, options)
    bounded_arm, unbounded_arm = _alternate(pipe, prompts_for(target, batch), (bounded, unbounded), rounds)
    rollouts = pipe.generate(prompts_for(target, batch), dataclasses.replace(unbounded, seed=0))
    sizes = np.concatenate([rollout.sampling_mask.sizes for rollout in rollouts])
    found = _compared(unbounded_arm, bounded_arm, "unbounded", "bounded")
    return found | {"support_mean": float(sizes.mean()), "support_most": int(sizes.max())}


def _pipe(target: Target, draft: Any, batch: int, options: Mapping[str, Any]) -> SpeculativePipeline:
    own = {"max_batch": batch, "max_length": 1024, "engine": ENGINES[target.device.type]}
    return SpeculativePipeline(target, draft, **(own | dict(options)))


def _alternate(
    pipe: SpeculativePipeline, prompts: list[Any], params: tuple[SamplingParams, SamplingParams], rounds: int
) -> tuple[Arm, Arm]:
    """An arm each, run in turn, the first and the second going first in turn."""
    arms = Arm(pipe, prompts, params[0]), Arm(pipe, prompts, params[1])
    for arm in arms:
        arm.warm_up()
    for i in range(rounds):
        for arm in arms if i % 2 else reversed(arms):
            arm.run()
    return arms


def _compared(over: Arm, under: Arm, over_name: str, under_name: str) -> dict[str, Any]:
    return {
        "ratio": over.rate / under.rate,
        "ratio_of_rounds": under.figures()["ms_a_round"] / over.figures()["ms_a_round"],
        under_name: under.figures(),
        over_name: over.figures(),
    }


def soak(
    target: Target, draft: Any, tokens: int, goes_on: Callable[[], bool] = lambda: True, **options: Any
) -> dict[str, int]:
    """So many tokens, half of them recorded: how many masks there are, and how many are missing or wrong.

    goes_on: asked between parts of the requests; the counts are of those that ran.
    """
    size = 256
    pipe = SpeculativePipeline(target, draft, **({"max_batch": 32, "max_length": 1024} | options))
    plain = SamplingParams(temperature=1.0, top_k=128, top_p=0.95, max_new_tokens=size, ignore_eos=True)
    recorded = dataclasses.replace(plain, return_sampling_mask=True, sampling_logprobs="support")
    params = [dataclasses.replace(plain if i % 2 else recorded, seed=i) for i in range(tokens // size)]
    prompts = prompts_for(target, len(params))
    found = dict.fromkeys(MASK_COUNTS, 0)
    for first in range(0, len(params), _SOAKED_AT_ONCE):
        if not goes_on():
            break
        part = slice(first, first + _SOAKED_AT_ONCE)
        for rollout, policy in zip(pipe.generate(prompts[part], params[part]), params[part], strict=True):
            found["tokens"] += len(rollout.token_ids)
            if policy.return_sampling_mask:
                found["requested"] += size
                count_masks(rollout, found)
    found["missing"] = found["requested"] - found["masks"]
    return found


def count_masks(rollout: Any, found: dict[str, int]) -> None:
    """Add a recorded rollout's masks, and what is wrong with them."""
    mask = rollout.sampling_mask
    if mask is None:  # refused or aborted
        return
    found["masks"] += len(mask)
    found["misaligned"] += int(len(mask) != len(rollout.token_ids) or len(mask.logprobs) != len(mask.token_ids))
    for row, token in enumerate(rollout.token_ids):
        ids, logprobs = mask[row], mask.row_logprobs(row)
        at = np.searchsorted(ids, token)
        found["outside"] += int(at == len(ids) or ids[at] != token or logprobs[at] != rollout.logprobs[row])
        found["unnormalised"] += int(abs(np.exp(logprobs.astype(np.float64)).sum() - 1) > 1e-4)


def ratios(figures: Mapping[str, Any]) -> dict[str, float]:
    """Methods over ordinary decoding, all over transformers' modes, and masks on over off, as far as measured."""
    rate = {
        name: statistics.median(arm["tokens_per_second"])
        for name, arm in figures["arms"].items()
        if arm.get("tokens_per_second")
    }
    found = {}
    for name, own in rate.items():
        method, rest = name.split(", ", 1)
        base = rate.get(f"{ORDINARY}, {rest}")
        if method != ORDINARY and base:
            found[f"{method} over {ORDINARY}, {rest}"] = own / base
    peers = {name.rsplit(", ", 1)[0]: statistics.median(rates) for name, rates in figures["peers"].items()}
    modes = {name: rate for name, rate in peers.items() if name in MODES}
    for method in [name for name in peers if name not in MODES]:
        found |= {f"{method} over {mode}": peers[method] / rate for mode, rate in modes.items()}
        if modes.keys() >= {EAGER, COMPILED}:
            found[f"{method} over the best mode of generate"] = peers[method] / max(modes.values())
        if method != ORDINARY and ORDINARY in peers:
            found[f"{method} over {ORDINARY}, as transformers"] = peers[method] / peers[ORDINARY]
    for method, one in figures["masks_on_over_off"].items():
        found[f"masks on over off, {method}"] = one["ratio"]
    for method, one in figures["unbounded_over_bounded"].items():
        found[f"masks of top_p alone over bounded ones, {method}"] = one["ratio"]
    return found
