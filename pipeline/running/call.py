"""One call of `generate`: its prompts on their way in, its rollouts on their way out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from pipeline.errors import InvalidRequest
from pipeline.policy.contract import Capabilities
from pipeline.policy.params import SamplingParams
from pipeline.prompts import Prompted
from pipeline.results.rollout import Rollout
from pipeline.running.intake import Intake, policies_of


class Call:
    """Queues a call's prompts a few at a time, so that one is encoded while rounds of those before it run.

    Args:
        intake: The pipeline's.
        prompts, params: As `SpeculativePipeline.generate` takes them.

    Attributes:
        distinct: The call's parameters, each once.
        num_open: Samples that haven't ended, of prompts that haven't been queued too.

    Raises:
        InvalidRequest: `params` and `prompts` don't match.
    """

    def __init__(
        self, intake: Intake, prompts: Sequence[Prompted], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> None:
        policies = policies_of(prompts, params)
        self._intake = intake
        self._coming = deque(enumerate(zip(prompts, policies, strict=True)))
        self._ended: dict[int, list[Rollout]] = {}
        self._ahead: np.ndarray | InvalidRequest | None = None  # what `encode_next` found
        self.distinct = list({id(policy): policy for policy in policies}.values())
        self._numbers = {id(policy): number for number, policy in enumerate(self.distinct)}
        self.num_open = sum(policy.n for policy in policies)

    @property
    def tickets(self) -> list[int]:
        """Of the prompts that were queued or refused."""
        return list(self._ended)

    @property
    def num_coming(self) -> int:
        """Prompts that haven't been queued."""
        return len(self._coming)

    def encode_next(self) -> None:
        """Encode the prompt that is queued next, so that `queue` needn't: for when nothing waits for the host."""
        if self._coming and self._ahead is None:
            _, (prompt, _) = self._coming[0]
            try:
                self._ahead = self._intake.encode(prompt)
            except InvalidRequest as refusal:
                self._ahead = refusal

    def queue(self, can: Capabilities) -> None:
        """Queue the next prompt, or refuse it."""
        index, (prompt, policy) = self._coming.popleft()
        ahead, self._ahead = self._ahead, None
        ticket, number = self._intake.ticket(), self._numbers[id(policy)]
        self._ended[ticket] = []
        try:
            if isinstance(ahead, InvalidRequest):
                raise ahead
            token_ids = self._intake.encode(prompt) if ahead is None else ahead
            self._intake.check(token_ids, policy, can)
        except InvalidRequest as refusal:
            for rollout in Rollout.refused(str(refusal), index, policy.n, number):
                self.take(ticket, rollout)
        else:
            self._intake.enqueue(ticket, token_ids, policy, index, number)

    def take(self, ticket: int, rollout: Rollout) -> bool:
        """Take in a rollout if it is of this call; whether it is."""
        if ticket not in self._ended:
            return False
        self._ended[ticket].append(rollout)
        self.num_open -= 1
        return True

    def rollouts(self) -> list[Rollout]:
        """In the order of the prompts, the samples of a prompt side by side."""
        return [r for found in self._ended.values() for r in sorted(found, key=lambda r: r.sample_index)]
