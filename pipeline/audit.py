"""The audit: derives every accept, replacement and draw of a rollout again, and says where the record disagrees.

Token i was decided by a row with integer weights w over its support, total their sum. Where the round's drafts were
chosen, u is the coin at position i:

    the draft x is kept        iff  u * total < w[x]  or  w[x] >= total
    else a replacement         from w without x
    without a draft: a draw    from w

Drawn drafts were verified as a block: rows 0, 1, ... of the round, each with a scale s (1 in row 0), a draft x and its
law q, and from row 1 on a bound h and a coin u of the round:

    the next row's scale       min(1, s * (w[x] / (q[x] * total)))
    what is left of a row      r = trunc(max(0, s * w - q * total)), R its sum
    h                          min(s, R / (R + (1 - s) * total));  s where u >= s, and in the last row
    kept                       are the drafts before the last row with u < h
    then a draw                from that row's r, or from w in a row without a draft

A draw walks the support in ascending token id and takes the first id whose cumulative weight exceeds
floor(u * total of what is drawn from); where nothing is left to draw from, it is from w. Products are float64, in the
order written. These are the rules of `gpu.verify_chain`, written again on Python's and NumPy's numbers: the audit calls
no kernel, and of `gpu` only the coins.

What it can't see: whether the rows are the model's (it has no logits); whether a bound is right that is held against
its coin behind the last token of its round, but for its scale in the row next to it, because only rows of tokens are
recorded; and a change that no decision, sum or log-probability depends on. The seed of a greedy rollout is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import gpu
from pipeline.errors import InvalidRequest
from pipeline.results.audit_record import DTYPES, RAGGED, AuditRecord
from pipeline.results.rollout import Rollout

TOLERANCE = 1e-5
"""Between a recorded log-probability and the one of the integer weights, which are rounded down from float32."""


@dataclass(frozen=True)
class Disagreement:
    """The first thing that the record says otherwise.

    Attributes:
        position: The output token, from 0.
        what: What disagrees: "token", "accepted", "total", ...; the names of `AuditRecord` and `Rollout`.
        expected: What the other records and the seed lead to.
        found: What is recorded.
    """

    position: int
    what: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"token {self.position}: {self.what}={self.found}, expected {self.expected}"


@dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Attributes:
        num_tokens: Tokens that were derived again and agree; all of them if there is no disagreement.
        num_rounds: Verification rounds that these tokens are of.
        num_coins: Coins that were tossed again for them: one a draft tested, in a block one a bound; one a token drawn.
        disagreement: The first one, or None.
    """

    num_tokens: int
    num_rounds: int
    num_coins: int
    disagreement: Disagreement | None = None

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return self.disagreement is None

    def __str__(self) -> str:
        checked = f"{self.num_tokens} tokens, {self.num_rounds} rounds, {self.num_coins} coins agree"
        return checked if self.disagreement is None else f"{checked}; then {self.disagreement}"


def audit(rollout: Rollout) -> AuditReport:
    """Derive a rollout's tokens again from its seed and its recorded rows.

    Beside the decisions it checks what else the rollout says of them: rounds and accepted drafts, log-probabilities
    to `TOLERANCE`, the sampling mask.

    Args:
        rollout: Generated with ``SamplingParams(record="audit")``, perhaps read back from Parquet.

    Raises:
        InvalidRequest: The rollout has no audit record: it wasn't asked for, or the request was refused or aborted.
    """
    record = rollout.audit
    if record is None or rollout.seed is None:
        raise InvalidRequest(
            "rollout.audit=None, expected the record of a finished rollout: generate it with "
            'SamplingParams(record="audit")'
        )
    coins = 0
    try:
        _check_lengths(rollout, record)
        tossed = _coins(rollout.seed, record)
        block = None
        for i in range(len(record)):
            token = _Token(rollout, record, i, tossed)
            token.check_row()
            if record.rows[i] == 0:
                block = _Block.of(rollout, record, i)
                coins += 0 if block is None else len(block.coins)
            token.check_decision(block)
            coins += int(block is None and record.draft_tokens[i] >= 0) + int(not record.accepted[i])
        _check_end(rollout, record)
    except _Found as found:
        at = found.disagreement.position
        rounds = len(np.unique(record.rounds[:at]))
        return AuditReport(at, rounds, coins, found.disagreement)
    return AuditReport(len(record), len(np.unique(record.rounds)), coins)


class _Found(Exception):
    """Ends the audit at the first disagreement."""

    def __init__(self, position: int, what: str, expected: Any, found: Any) -> None:
        self.disagreement = Disagreement(int(position), what, expected, found)


def _same(position: int, what: str, expected: Any, found: Any) -> None:
    if found != expected:
        raise _Found(position, what, expected, found)


def _check_lengths(rollout: Rollout, record: AuditRecord) -> None:
    """Every array has a row a token and the ragged ones an entry where their offsets say so."""
    n = len(rollout.token_ids)
    for name, held in (("logprobs", rollout.logprobs), ("sampling_mask", rollout.sampling_mask)):
        if held is not None and len(held) != n:
            raise _Found(min(len(held), n), name, f"{n} rows", f"{len(held)} rows")
    arrays = {name: getattr(record, name) for name in DTYPES}
    ragged = {name for names in RAGGED.values() for name in names}
    for name, array in arrays.items():
        if name not in ragged:
            rows = len(array) - (name in RAGGED)
            if rows != n:
                raise _Found(min(rows, n), name, f"{n} rows", f"{rows} rows")
    for offsets, names in RAGGED.items():
        _check_offsets(offsets, arrays[offsets])
        for name in names:
            size, end = len(arrays[name]), int(arrays[offsets][-1])
            if size != end:
                # The first row that isn't there, or the last one, behind which there is more.
                short = int(np.searchsorted(arrays[offsets][1:], size, side="right"))
                raise _Found(max(0, min(short, n - 1)), name, f"{end} entries", f"{size} entries")


def _check_offsets(name: str, offsets: np.ndarray) -> None:
    _same(0, name, 0, int(offsets[0]))
    falling = np.flatnonzero(np.diff(offsets) < 0)
    if falling.size:
        row = int(falling[0])
        raise _Found(row, name, f"at least {offsets[row]}", int(offsets[row + 1]))


def _coins(seed: int, record: AuditRecord) -> dict[int, np.ndarray]:
    """The coins of every token by purpose, float64 [n]."""
    positions = np.maximum(record.positions, 0)  # a negative one is found where its token is checked
    seeds = np.full(len(record), seed, np.uint64)
    return {purpose: gpu.uniforms(seeds, positions, 1, purpose)[:, 0] for purpose in (gpu.ACCEPT, gpu.DRAW)}


def _check_end(rollout: Rollout, record: AuditRecord) -> None:
    """The last round may have accepted drafts beyond the end of the output."""
    last = len(record) - 1
    rounds = int(record.rounds[last]) + 1 if len(record) else rollout.num_rounds
    _same(max(last, 0), "num_rounds", rounds, int(rollout.num_rounds))
    _same(max(last, 0), "num_accepted", f"{rounds} rounds", f"{len(rollout.num_accepted)} rounds")
    if len(record) and record.accepted[last] and rollout.num_accepted[rounds - 1] <= record.rows[last]:
        raise _Found(last, "num_accepted", f"at least {record.rows[last] + 1}", int(rollout.num_accepted[rounds - 1]))


class _Block:
    """A round whose drafts were verified as one, while its rows are gone through."""

    @classmethod
    def of(cls, rollout: Rollout, record: AuditRecord, i: int) -> _Block | None:
        """The round that begins with token i; None where its drafts were verified one by one."""
        bounds = record.bounds[record.bound_offsets[i] : record.bound_offsets[i + 1]]
        return cls(rollout, record, i, bounds) if bounds.size else None

    def __init__(self, rollout: Rollout, record: AuditRecord, i: int, bounds: np.ndarray) -> None:
        if not ((bounds >= 0) & (bounds <= 1)).all():
            raise _Found(i, "bound", "from 0 to 1", float(bounds[~((bounds >= 0) & (bounds <= 1))][0]))
        assert rollout.seed is not None
        seed, position = np.array([rollout.seed], np.uint64), record.positions[i : i + 1]
        self.bounds, self.scale = bounds, 1.0
        self.coins = gpu.uniforms(seed, position, bounds.size, gpu.ACCEPT_BLOCK)[0]
        below = np.flatnonzero(self.coins < bounds)
        self.kept = int(below[-1]) + 1 if below.size else 0
        rounds = int(record.rounds[i])
        listed = int(rollout.num_accepted[rounds]) if rounds < len(rollout.num_accepted) else "nothing"
        _same(i, "num_accepted", self.kept, listed)

    def tests(self, row: int) -> bool:
        """Whether a row tests a draft."""
        return row < self.bounds.size

    def check_bound(self, i: int, row: int, left: int, total: int) -> None:
        """Of a row with a draft, token i's, whose residual sums to `left`."""
        if row and self.coins[row - 1] < self.scale:
            whole = left + (1.0 - self.scale) * total
            bound = min(self.scale, left / whole) if whole > 0 else self.scale
            _same(i, "bound", bound, float(self.bounds[row - 1]))

    def go_on(self, i: int, row: int, weight: int, draft_prob: float, total: int) -> None:
        """Behind token i's draft: the scale, and what it says of the next row's bound."""
        self.scale = min(1.0, self.scale * (weight / (draft_prob * total)))
        bound, coin, last = float(self.bounds[row]), self.coins[row], row + 1 == self.bounds.size
        if last or coin >= self.scale:
            _same(i, "next bound", self.scale, bound)
        elif bound > self.scale:
            raise _Found(i, "next bound", f"at most {self.scale}", bound)


class _Token:
    """One token with its row of the record."""

    def __init__(self, rollout: Rollout, record: AuditRecord, i: int, coins: dict[int, np.ndarray]) -> None:
        self.rollout, self.record, self.i = rollout, record, i
        row = slice(record.offsets[i], record.offsets[i + 1])
        self.ids, self.weights = record.token_ids[row], record.weights[row].astype(np.int64)
        self.law = record.proposal_probs[record.proposal_offsets[i] : record.proposal_offsets[i + 1]].astype(np.float64)
        self.total = int(record.totals[i])
        self.draft, self.draft_prob = int(record.draft_tokens[i]), float(record.draft_probs[i])
        self.accept_coin, self.draw_coin = float(coins[gpu.ACCEPT][i]), float(coins[gpu.DRAW][i])

    def check_row(self) -> None:
        self._check_place()
        self._check_row()
        self._check_proposal()

    def check_decision(self, block: _Block | None) -> None:
        row, scale = int(self.record.rows[self.i]), 1.0
        if block is None or not block.tests(row):
            _same(self.i, "proposal", "none", "none" if self.law.size == 0 else "a law")
        elif self.law.size == 0:
            raise _Found(self.i, "proposal", "a law", "none")
        if block is not None:
            scale = block.scale
        left = self._left(scale)
        if block is None:
            accepted = self._accepts()
        else:
            accepted = row < block.kept
            if self.law.size:
                block.check_bound(self.i, row, sum(left.tolist()), self.total)
                block.go_on(self.i, row, self._weight_of_draft(), self.draft_prob, self.total)
        _same(self.i, "accepted", accepted, bool(self.record.accepted[self.i]))
        token = self.draft if accepted else self._drawn(left)
        _same(self.i, "token", token, int(self.rollout.token_ids[self.i]))
        self._check_rollout()

    def _check_place(self) -> None:
        record, i = self.record, self.i
        follows = i > 0 and bool(record.accepted[i - 1])
        before = int(record.rounds[i - 1]) if i else -1
        _same(i, "round", before if follows else before + 1, int(record.rounds[i]))
        _same(i, "row", int(record.rows[i - 1]) + 1 if follows else 0, int(record.rows[i]))
        _same(i, "position of the coins", i, int(record.positions[i]))

    def _check_row(self) -> None:
        if self.ids.size == 0:
            raise _Found(self.i, "support", "at least one token", "none")
        if self.ids[0] < 0 or (np.diff(self.ids) <= 0).any():
            raise _Found(self.i, "support", "ids in ascending order", self.ids.tolist()[:16])
        if (self.weights < 0).any():
            raise _Found(self.i, "weight", "at least 0", int(self.weights.min()))
        _same(self.i, "sum of weights", self.total, sum(self.weights.tolist()))
        if self.total == 0:
            raise _Found(self.i, "total", "above 0", 0)

    def _check_proposal(self) -> None:
        if self.draft < 0:
            _same(self.i, "draft token", -1, self.draft)
            if not math.isnan(self.draft_prob):
                raise _Found(self.i, "draft probability", math.nan, self.draft_prob)
            _same(self.i, "proposal", "none", "none" if self.law.size == 0 else "a law")
            return
        if self.law.size == 0:
            _same(self.i, "draft probability", 1.0, self.draft_prob)
            return
        if not 0 < self.draft_prob < math.inf:
            raise _Found(self.i, "draft probability", "above 0 and finite", self.draft_prob)
        _same(self.i, "proposal", f"{self.ids.size} entries", f"{self.law.size} entries")
        if not (self.law >= 0).all():
            raise _Found(self.i, "proposal", "probabilities", float(self.law[~(self.law >= 0)][0]))
        at = self._place_of(self.draft)
        if at is not None:
            _same(self.i, "draft probability", float(self.law[at]), self.draft_prob)

    def _accepts(self) -> bool:
        if self.draft < 0:
            return False
        weight, total = float(self._weight_of_draft()), float(self.total)
        return self.accept_coin * total < weight or weight >= total

    def _weight_of_draft(self) -> int:
        at = self._place_of(self.draft)
        return 0 if at is None else int(self.weights[at])

    def _left(self, scale: float) -> np.ndarray:
        """The weights of what is drawn from if the draft isn't kept."""
        if self.law.size:
            residual = scale * self.weights.astype(np.float64) - self.law * float(self.total)
            return np.where(residual > 0, residual, 0.0).astype(np.int64)
        if self.draft >= 0:
            return np.where(self.ids == self.draft, 0, self.weights)
        return self.weights

    def _drawn(self, left: np.ndarray) -> int:
        if not left.any():
            left = self.weights
        mass = np.cumsum(left)
        threshold = math.floor(self.draw_coin * float(int(mass[-1])))
        above = np.flatnonzero(mass > threshold)
        return int(self.ids[above[0] if above.size else np.flatnonzero(left)[-1]])

    def _place_of(self, token: int) -> int | None:
        at = int(np.searchsorted(self.ids, token))
        return at if at < self.ids.size and self.ids[at] == token else None

    def _check_rollout(self) -> None:
        rollout, i = self.rollout, self.i
        if not self.record.accepted[i]:
            rounds, row = int(self.record.rounds[i]), int(self.record.rows[i])
            listed = int(rollout.num_accepted[rounds]) if rounds < len(rollout.num_accepted) else "nothing"
            _same(i, "num_accepted", row, listed)
        if rollout.logprobs is not None:
            at = self._place_of(int(rollout.token_ids[i]))
            assert at is not None  # the token was drawn from the support
            self._check_logprobs("logprob", np.array([at]), rollout.logprobs[i : i + 1])
        mask = rollout.sampling_mask
        if mask is None:
            return
        if not np.array_equal(mask[i], self.ids):
            raise _Found(i, "sampling mask", self.ids.tolist()[:16], mask[i].tolist()[:16])
        if mask.mode == "support":
            logprobs = mask.row_logprobs(i)
            _same(i, "mask logprob", f"{self.ids.size} entries", f"{logprobs.size} entries")
            self._check_logprobs("mask logprob", np.arange(self.ids.size), logprobs)

    def _check_logprobs(self, what: str, places: np.ndarray, logprobs: np.ndarray) -> None:
        """A weight is the integer part of the true one, so a small one leaves an interval."""
        weights, total = self.weights[places].astype(np.float64), float(self.total)
        least = np.log(np.maximum(weights, 0.5) / total) - TOLERANCE
        most = np.log((weights + 1) / total) + TOLERANCE
        wrong = ~((logprobs <= most) & ((logprobs >= least) | (weights == 0)))
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            raise _Found(self.i, what, round(float(np.log(weights[first] / total)), 6), float(logprobs[first]))
