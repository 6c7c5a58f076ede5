"""The head of every token: the recorded candidates that its score is centered over.

Head probabilities keep their recorded mass; they are not renormalised. The taken token stands among the entries also
where the head lacks it (a rare token of an unfiltered policy), marked as not of the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.errors import InvalidRequest
from pipeline.replay.recorded import Recorded
from pipeline.results.mask_checks import SUM_TOLERANCE, check_supports, check_top, positions_of, rows_of
from pipeline.results.rollout import SamplingMask


@dataclass(frozen=True, eq=False)
class Head:
    """The heads of n tokens in CSR.

    Attributes:
        entries: In "support" mode: ids and rollout log-probabilities of every row's head, and the taken token.
        taken: int64 [n], where the taken token stands among the entries.
        in_head: bool [nnz], False for a taken token that its head lacks.
        mass: float64 [n], the rollout's of the head, as recorded.
        complete: Whether every head is the whole support, so that nothing lies outside.
    """

    entries: SamplingMask
    taken: np.ndarray
    in_head: np.ndarray
    mass: np.ndarray
    complete: bool


def support_head(recorded: Recorded, vocab_size: int, max_support: int | None) -> Head:
    """The complete recorded supports.

    Raises:
        InvalidRequest: Without a mask in "support" mode; a support that isn't one (see check_supports), lacks its
            token, or is larger than `max_support`; a log-probability of a token that isn't its support's own.
    """
    mask = recorded.mask
    if mask is None or mask.mode != "support":
        got = None if mask is None else f"one in mode {mask.mode!r}"
        raise InvalidRequest(
            f'mask={got}, expected one in mode "support": sample with return_sampling_mask=True, '
            'sampling_logprobs="support"'
        )
    check_supports(mask, vocab_size, max_support)
    taken = positions_of(recorded.token_ids, mask)
    _check_taken(recorded, mask.logprobs[taken], np.ones(len(recorded), bool))
    in_head = np.ones(len(mask.token_ids), bool)
    return Head(mask, taken, in_head, _mass(mask, in_head), True)


def top_head(recorded: Recorded, vocab_size: int) -> Head:
    """The recorded top K of unfiltered policies.

    Raises:
        InvalidRequest: By row: a filtered or greedy policy; ids outside the vocabulary or twice in a row; padding that
            isn't -1 with -inf at the end; log-probabilities that aren't a distribution's; an empty row; a token's
            log-probability that isn't its entry's own. Without `top_logprobs`.
    """
    top = recorded.top_logprobs
    if top is None:
        raise InvalidRequest("top_logprobs=None, expected the recorded top K: sample with top_logprobs=K")
    if recorded.filtered is not None and recorded.filtered.any():
        row = int(recorded.filtered.argmax())
        raise InvalidRequest(
            f"top_logprobs[{row}] of a filtered policy, expected top_k=None, top_p=1 and min_p=0: for filtered "
            'sampling record return_sampling_mask=True, sampling_logprobs="support" and center over the support'
        )
    greedy = np.flatnonzero(recorded.temperature < 1e-5)
    if len(greedy):
        raise InvalidRequest(
            f"temperature[{greedy[0]}]={recorded.temperature[greedy[0]]}, expected at least 1e-5: a greedy token has "
            "no score to center"
        )
    check_top("top_logprobs", top.ids, top.values, vocab_size)
    held = top.ids >= 0
    missing = ~(top.ids == recorded.token_ids[:, None]).any(1)
    rows, columns = np.nonzero(held)
    ids = np.concatenate([top.ids[rows, columns], recorded.token_ids[missing]])
    logprobs = np.concatenate([top.values[rows, columns], recorded.logprobs[missing]])
    of_row = np.concatenate([rows, np.flatnonzero(missing)])
    in_head = np.arange(len(ids)) < len(rows)
    order = np.lexsort((ids, of_row))
    offsets = np.concatenate([[0], np.cumsum(held.sum(1) + missing)]).astype(np.int64)
    # For a taken token outside the vocabulary. "selected" here only so that the rows needn't sum to one.
    check_supports(SamplingMask(ids[order], offsets, recorded.logprobs, "selected"), vocab_size, name="top_logprobs")
    entries = SamplingMask(ids[order], offsets, logprobs[order], "support")
    in_head = in_head[order]
    mass = _mass(entries, in_head)
    taken = positions_of(recorded.token_ids, entries)
    _check_taken(recorded, entries.logprobs[taken], in_head[taken])
    return Head(entries, taken, in_head, mass, False)


def _mass(entries: SamplingMask, in_head: np.ndarray) -> np.ndarray:
    probs = np.where(in_head, np.exp(entries.logprobs.astype(np.float64)), 0.0)
    return np.bincount(rows_of(entries.offsets), probs, len(entries))


def _check_taken(recorded: Recorded, logprobs: np.ndarray, in_head: np.ndarray) -> None:
    differ = in_head & ~(np.abs(logprobs - recorded.logprobs) <= SUM_TOLERANCE)
    if differ.any():
        row = int(differ.argmax())
        raise InvalidRequest(
            f"logprobs[{row}]={recorded.logprobs[row]}, expected {logprobs[row]}, which the token has in its own head: "
            "the records don't line up"
        )
