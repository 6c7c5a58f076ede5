"""The exact law of short outputs by enumeration, and the chi-square test against samples."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pipeline.pipeline import SpeculativePipeline
from pipeline.policy.params import SamplingParams
from pipeline.testing.reference import next_logits, policy

FALSE_ALARM = 1e-4
"""The chance that a comparison refuses a method that keeps the law."""

FEWEST = 5
"""Expected counts below it are pooled into one cell."""


def enumerate_law(
    target: Any, prompt: list[int], params: SamplingParams, length: int, filter_order: str = "top_k_first"
) -> np.ndarray:
    """The probability of every output of `length` tokens behind the prompt: float64 [V, ..., V]."""
    law = np.ones(())
    for step in range(length):
        prefixes = list(itertools.product(range(target.vocab_size), repeat=step))
        logits = next_logits(target, [[*prompt, *prefix] for prefix in prefixes])
        rows = np.stack([policy(row, params, filter_order)[0] for row in logits])
        law = law[..., None] * rows.reshape(*law.shape, target.vocab_size)
    return law


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """The chi-square p-value of counts against a law, both of one shape; 0 where an impossible output occurred."""
    observed, expected = counts.ravel().astype(np.float64), law.ravel() * counts.sum()
    if observed[expected == 0].any():
        return 0.0
    rare = expected < FEWEST
    observed, expected = (np.append(values[~rare], values[rare].sum()) for values in (observed, expected))
    if expected[-1] < FEWEST and len(expected) > 1:
        observed, expected = (np.append(values[:-2], values[-2:].sum()) for values in (observed, expected))
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))


def check_law(
    pipe: SpeculativePipeline,
    params: SamplingParams,
    *,
    prompt: list[int],
    samples: int = 20_000,
    length: int = 3,
) -> float:
    """Hold `samples` outputs of a pipeline against the enumeration of its target's policy; returns the p-value.

    Every token is pooled, accepted, replaced and bonus alike: only their union follows the policy. One token more than
    `length` is generated, so that blocks run whole.

    Raises:
        AssertionError: The p-value is below FALSE_ALARM, or a sample failed.
    """
    order = pipe.state.options.filter_order
    law = enumerate_law(pipe.state.target, prompt, params, length, order)
    rollouts = pipe.generate([prompt], replace(params, n=samples, max_new_tokens=length + 1, ignore_eos=True))
    assert not rollouts.failed, f"{len(rollouts.failed)} samples failed: {rollouts.failed[0].error}"
    counts = np.zeros(law.shape, np.int64)
    np.add.at(counts, tuple(np.array([r.token_ids[:length] for r in rollouts]).T), 1)
    found = p_value(counts, law)
    assert found > FALSE_ALARM, f"law of {params}: p-value={found:.2e}, expected above {FALSE_ALARM}"
    return found
