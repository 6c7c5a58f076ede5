"""One sample on its way through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.batch.stopping import StopScanner
from pipeline.grammars.walk import Walk
from pipeline.policy.params import SamplingParams
from pipeline.results.chunk import Records
from pipeline.results.rollout import FinishReason


@dataclass(eq=False)
class Prompt:
    """What the samples of one prompt share.

    Attributes:
        token_ids: int32 [n].
        ticket: Unique in the pipeline.
        index: Its place in the call.
        unstarted: Indices of the samples that haven't been through prefill.
        prefix: Between the first sample's prefill and the last's: what `stages.prefill` keeps for the others.
    """

    token_ids: np.ndarray
    ticket: int
    index: int
    unstarted: set[int]
    prefix: Any = None


@dataclass(eq=False)
class Request:
    """One sample: its policy, its place in the batch and what it has committed so far.

    Attributes:
        prompt: Shared with its siblings.
        sample_index: Which sample of the prompt.
        params: Its policy and limits; `params_index` numbers the distinct ones of a call.
        seed: 64 bits: all its randomness.
        scanner: Looks for the end in committed tokens.
        grammar: Where it stands in its grammar; None without one.
        deadline: When its `max_time` is over, on the state's clock, set by admit; None: never.
        slot: The batch row, set by admit; -1 before and after.
        cached: Tokens whose keys and values the target's cache holds, set by prefill and commit. The anchor, the
            newest token, is never among them.
        token_ids: The committed output, set by finish.
        records: The same tokens with their records, set by finish.
        num_accepted: Drafts accepted a round.
        error: Why it must end as "abort", set by any stage.
        finish_reason: Set by finish.
    """

    prompt: Prompt
    sample_index: int
    params: SamplingParams
    params_index: int
    seed: int
    scanner: StopScanner
    grammar: Walk | None = None
    deadline: float | None = None
    slot: int = -1
    cached: int = 0
    token_ids: list[int] = field(default_factory=list)
    records: Records = field(default_factory=Records)
    num_accepted: list[int] = field(default_factory=list)
    error: str | None = None
    finish_reason: FinishReason | None = None

    @property
    def anchor(self) -> int:
        """The newest committed token: the first of the next block."""
        return self.token_ids[-1]

    @property
    def num_generated(self) -> int:
        """Committed output tokens: the position of the next one in the request's random stream."""
        return len(self.token_ids)

    def remaining(self, max_length: int) -> int:
        """How many tokens it may still commit."""
        return min(self.params.max_new_tokens, max_length - len(self.prompt.token_ids)) - len(self.token_ids)

    def mark(self) -> tuple[int, int, int, int, str | None]:
        """Where it stands, for `go_back`."""
        return self.slot, self.cached, self.num_generated, len(self.num_accepted), self.error

    def go_back(self, mark: tuple[int, int, int, int, str | None]) -> None:
        """Forget what was committed since `mark`."""
        self.slot, self.cached, tokens, rounds, self.error = mark
        del self.token_ids[tokens:], self.num_accepted[rounds:]
        self.records.cut(tokens)
        self.finish_reason = None
        self.scanner.restart(self.token_ids)
        if self.grammar is not None:
            self.grammar.go_back(self.token_ids)

    def restart(self) -> None:
        """Forget everything: it waits again, and its prompt has one more sample that hasn't been through prefill."""
        self.prompt.unstarted.add(self.sample_index)
        self.go_back((-1, 0, 0, 0, None))

    def fail(self, reason: str) -> None:
        """End it as "abort" at the next finish; the first reason stays."""
        # Text that a file can hold: an exception's may have lone surrogates.
        self.error = self.error or reason.encode("utf-8", "replace").decode()
