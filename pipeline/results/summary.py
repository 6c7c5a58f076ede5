"""What came of a run, in figures, from rollouts one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from pipeline.policy.reasons import kind_of
from pipeline.results.rollout import Rollout

MOST_NAMES = 5
"""Prompts that the summary names beside a reason."""
MOST_REASONS = 200
"""Kinds of reasons that it holds; those that come later are counted as `OTHER`."""
OTHER = "other reasons: see the column `error` of the rollouts"


@dataclass
class Summary:
    """Sums over rollouts; it holds none of them.

    Attributes:
        num_rollouts: All, those that failed included.
        num_tokens: Output tokens.
        num_decoded: Output tokens that came from a round after the prefill.
        num_rounds: Those rounds.
        support_sizes: How often a support had so many tokens, by size.
        failures: How many rollouts failed for a reason or others of its kind (policy/reasons.py), by the first one;
            `examples` has the first names of their prompts.
    """

    num_rollouts: int = 0
    num_tokens: int = 0
    num_decoded: int = 0
    num_rounds: int = 0
    support_sizes: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._first = {kind_of(reason): reason for reason in self.failures}

    def add(self, rollouts: Iterable[Rollout], name: str) -> None:
        """Count the rollouts of a prompt; `name` is the prompt's, for a reader."""
        for rollout in rollouts:
            self.num_rollouts += 1
            if rollout.error is not None:
                self._fail(rollout.error, 1, [name])
                continue
            self.num_tokens += len(rollout.token_ids)
            self.num_decoded += len(rollout.token_ids) - 1
            self.num_rounds += rollout.num_rounds - 1
            if rollout.sampling_mask is not None:
                self.support_sizes.update(rollout.sampling_mask.sizes.tolist())

    def merge(self, other: Summary) -> None:
        """Count what the other has counted."""
        for name in ("num_rollouts", "num_tokens", "num_decoded", "num_rounds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.support_sizes.update(other.support_sizes)
        for reason, count in other.failures.items():
            self._fail(reason, count, other.examples[reason])

    def to_dict(self) -> dict[str, Any]:
        """The sums, as JSON can hold them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Summary:
        """What `to_dict` gave, after a way through JSON.

        Raises:
            KeyError, TypeError, ValueError: It isn't that.
        """
        numbers = {one.name: int(held[one.name]) for one in fields(cls) if one.name.startswith("num_")}
        sizes = Counter({int(size): int(count) for size, count in held["support_sizes"].items()})
        failures = Counter({str(reason): int(count) for reason, count in held["failures"].items()})
        examples = {reason: [str(name) for name in held["examples"][reason]] for reason in failures}
        return cls(**numbers, support_sizes=sizes, failures=failures, examples=examples)

    def _fail(self, reason: str, count: int, names: Iterable[str]) -> None:
        kind = kind_of(reason)
        if kind not in self._first and len(self._first) >= MOST_REASONS:
            kind, reason = kind_of(OTHER), OTHER
        reason = self._first.setdefault(kind, reason)
        self.failures[reason] += count
        known = self.examples.setdefault(reason, [])
        known += [name for name in dict.fromkeys(names) if name not in known][: MOST_NAMES + 1 - len(known)]

    @property
    def num_failed(self) -> int:
        """Rollouts that were refused or aborted."""
        return sum(self.failures.values())

    @property
    def tokens_a_round(self) -> float:
        """Tokens committed a round, bonus included, the prefill's first token left out; NaN without a round."""
        return self.num_decoded / self.num_rounds if self.num_rounds else float("nan")

    def support_quantiles(self, *fractions: float) -> list[int]:
        """The smallest size that so large a part of the supports doesn't exceed, for each fraction in (0, 1]."""
        sizes = np.array(sorted(self.support_sizes), np.int64)
        reached = np.cumsum([self.support_sizes[size] for size in sizes.tolist()])
        return [int(sizes[np.searchsorted(reached, fraction * reached[-1])]) for fraction in fractions]

    def lines(self, seconds: float, before: int = 0) -> list[str]:
        """The figures for a reader, a line each.

        Args:
            seconds: What the tokens took, except `before`: those of earlier runs.
        """
        tokens = self.num_tokens - before
        rate = tokens / seconds if seconds > 0 else float("nan")
        earlier = f" after {before} in earlier runs" if before else ""
        text = [
            f"requests        {self.num_rollouts}, of which {self.num_rollouts - self.num_failed} done and "
            f"{self.num_failed} refused or aborted",
            f"tokens          {tokens} in {seconds:.1f} s, {rate:.1f} tokens/s{earlier}",
        ]
        if self.num_rounds:
            text.append(f"tokens a round  {self.tokens_a_round:.2f}")
        if self.support_sizes:
            total = sum(self.support_sizes.values())
            mean = sum(size * count for size, count in self.support_sizes.items()) / total
            half, most, largest = self.support_quantiles(0.5, 0.99, 1.0)
            text.append(f"support sizes   mean {mean:.1f}, p50 {half}, p99 {most}, max {largest}")
        for reason, count in self.failures.most_common():
            names = self.examples[reason]
            shown = ", ".join(names[:MOST_NAMES] + ["..."] * (len(names) > MOST_NAMES))
            first = "" if count == 1 or reason == OTHER else ", the first"
            text.append(f"failed          {count} ({shown}){first}: {reason}")
        return text
