"""Records of rollouts: aligned, complete, the policy's own, and without influence on what is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.audit import audit
from pipeline.pipeline import SpeculativePipeline
from pipeline.policy.params import SamplingParams
from pipeline.results.rollout import Rollout
from pipeline.testing.reference import next_logits, policy

TOLERANCE = 2e-5
"""The largest L1 distance of a recorded distribution from the reference's: float32 forwards differ by their width."""


def check_alignment(rollout: Rollout) -> None:
    """n tokens, n rows of every record, each token in its support, its log-probability in both places the same.

    Raises:
        AssertionError: What doesn't line up.
    """
    assert rollout.ok, rollout.error
    mask, n = rollout.sampling_mask, len(rollout.token_ids)
    assert mask is not None, "no mask, expected a rollout of a mask request"
    assert rollout.logprobs is not None, "no log-probabilities, expected return_logprobs=True"
    assert len(mask) == len(rollout.logprobs) == n, f"{n} tokens, {len(mask)} masks, {len(rollout.logprobs)} logprobs"
    assert rollout.num_rounds == len(rollout.num_accepted)
    assert rollout.num_accepted.sum() + rollout.num_rounds >= n, "more tokens than rounds can have committed"
    for i, (token, row) in enumerate(zip(rollout.token_ids, mask, strict=True)):
        assert token in row, f"token {i}: {token} isn't in its support {row}"
        assert (np.diff(row) > 0).all(), f"support {i}: {row}, expected ascending ids"
        if mask.mode == "support":
            logprobs = mask.row_logprobs(i)
            assert logprobs[row == token] == rollout.logprobs[i], f"token {i}: two log-probabilities"
            assert abs(np.exp(logprobs.astype(np.float64)).sum() - 1) < TOLERANCE, f"support {i} doesn't sum to 1"
    if rollout.audit is not None:
        assert len(rollout.audit) == n, f"{n} tokens, {len(rollout.audit)} audit rows"
        report = audit(rollout)
        assert report.ok, str(report)


def check_masks(pipe: SpeculativePipeline, prompts: Sequence[list[int]], params: SamplingParams) -> int:
    """Generate with every record on, and hold each row against the policy of a forward without a cache.

    Then again without records, and each prompt alone: the tokens are the same.

    Returns:
        Rows that were compared.

    Raises:
        AssertionError: What differs.
    """
    recording = replace(params, return_sampling_mask=True, sampling_logprobs="support", record="audit")
    rollouts = pipe.generate(prompts, recording)
    compared = 0
    for rollout in rollouts:
        check_alignment(rollout)
        mask = rollout.sampling_mask
        assert mask is not None
        tokens = [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]
        for i, support in enumerate(mask):
            prefix = tokens[: len(rollout.prompt_token_ids) + i]
            [logits] = next_logits(pipe.state.target, [prefix])
            probs, close = policy(logits, params, pipe.state.options.filter_order)
            if close:
                continue
            wanted = np.flatnonzero(probs)
            assert support.tolist() == wanted.tolist(), f"token {i}: support {support}, expected {wanted}"
            distance = np.abs(np.exp(mask.row_logprobs(i).astype(np.float64)) - probs[wanted]).sum()
            assert distance < TOLERANCE, f"token {i}: L1 distance {distance:.1e}, expected below {TOLERANCE}"
            compared += 1
    plain = pipe.generate(prompts, params)
    alone = [pipe.generate([prompt], params)[0] for prompt in prompts]
    for recorded, bare, single in zip(rollouts, plain, alone, strict=True):
        assert recorded.token_ids.tolist() == bare.token_ids.tolist(), "recording changed the tokens"
        assert single.token_ids.tolist() == bare.token_ids.tolist(), "company changed the tokens"
    return compared
