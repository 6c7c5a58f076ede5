"""Everything that the contract promises, held against one speculative method on a tiny target."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from model_loaders import tiny_target
from pipeline.pipeline import SpeculativePipeline
from pipeline.policy.params import SamplingParams
from pipeline.testing.law import check_law
from pipeline.testing.records import check_masks

POLICIES = {
    "unfiltered": SamplingParams(temperature=1.3, seed=20260),
    "filtered": SamplingParams(temperature=0.9, top_k=6, top_p=0.9, min_p=0.05, seed=20260),
}
RECORDED = (
    SamplingParams(temperature=1.1, top_k=6, top_p=0.9, seed=7, max_new_tokens=24),
    SamplingParams(temperature=1.1, top_p=0.8, min_p=0.1, seed=7, max_new_tokens=24),
    SamplingParams(temperature=0.0, seed=7, max_new_tokens=24),
)
PROMPT = [4, 7, 5, 4, 7]
"""It repeats itself, so that a method which looks things up finds something."""


@dataclass
class Report:
    """What a method was found to do.

    Attributes:
        method: Its name.
        declared: Whether it declares the contract; if not, only that it generates and that masks are refused was
            checked.
        p_values: Of the law, by policy.
        drafts_a_round, accepted_a_round: How much speculation there was to check.
        rows: Recorded policies that were compared with the reference.
    """

    method: str
    declared: bool
    p_values: dict[str, float] = field(default_factory=dict)
    drafts_a_round: float = 0.0
    accepted_a_round: float = 0.0
    rows: int = 0


def check_proposer(
    proposer: Any | Callable[[Any], Any], *, vocab_size: int = 10, samples: int = 10_000, length: int = 3
) -> Report:
    """Hold a speculative method against its declaration, on a target whose laws can be enumerated.

    - The law: `samples` outputs under each of POLICIES against the enumeration (`law.FALSE_ALARM` each).
    - Records: alignment, supports and log-probabilities against a reference, an audit of every token; neither records
      nor company change a token.
    - Greedy requests give what ordinary decoding gives.
    - Without the declaration: it generates, and masks are refused.

    Seeds are fixed, so the same method gives the same report. With 10,000 samples a law that is off by 0.03 in a
    probability of 0.3 is refused nearly always.

    Args:
        proposer: A `Proposer` or a draft; or a function that makes one for the `model_loaders.Target` that it is given.
        vocab_size: Of the target, at least 8; the enumeration has ``vocab_size ** length`` outputs.
        samples: A policy.
        length: Tokens of an output.

    Raises:
        AssertionError: What the method doesn't keep.
    """
    target = tiny_target(vocab_size)
    made: Any = proposer if hasattr(proposer, "propose") else proposer(target)
    room = len(PROMPT) + length + 2 + made.num_drafts
    wide = SpeculativePipeline(target, made, max_batch=1024, max_length=max(room, 32), allow_unbounded_support=True)
    report = Report(made.method, wide.capabilities.mask_contract)
    pipe = SpeculativePipeline(target, made, max_batch=4, max_length=128, allow_unbounded_support=True)
    ordinary = SpeculativePipeline(target, None, max_batch=4, max_length=128)
    prompts = [PROMPT, [1, 2, 1, 2], [3]]
    greedy = SamplingParams(temperature=0, max_new_tokens=24)
    for ours, theirs in zip(pipe.generate(prompts, greedy), ordinary.generate(prompts, greedy), strict=True):
        assert ours.ok, ours.error
        assert ours.token_ids.tolist() == theirs.token_ids.tolist(), "greedy tokens differ from ordinary decoding's"
    if not report.declared:
        with warnings.catch_warnings(record=True):
            refused = pipe.generate([PROMPT], SamplingParams(top_k=4, return_sampling_mask=True))[0]
        assert not refused.ok, "a mask was handed out, expected a refusal: the method doesn't declare the contract"
        return report
    drafts, accepted, blocks = 0, 0, 0

    def see(verified: Any) -> None:
        nonlocal drafts, accepted, blocks
        if verified.proposal.requests and verified.proposal.requests[0].num_generated:
            drafts += int(verified.proposal.num_drafts.sum())
            accepted += int(verified.verdict.num_accepted.sum())
            blocks += len(verified.proposal.requests)

    leave = wide.observe("verify", see)
    for name, params in POLICIES.items():
        report.p_values[name] = check_law(wide, params, prompt=PROMPT, samples=samples, length=length)
    leave()
    report.drafts_a_round, report.accepted_a_round = drafts / blocks, accepted / blocks
    assert accepted, f"{drafts} drafts in {blocks} blocks, expected some to be accepted: nothing was speculated"
    for params in RECORDED:
        report.rows += check_masks(pipe, prompts, params)
    return report
