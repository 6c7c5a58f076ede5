"""What becomes of prompts and parameters before a round sees them: checked, seeded and queued."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gpu
from pipeline.batch.request import Prompt, Request
from pipeline.batch.state import State
from pipeline.batch.stopping import StopScanner
from pipeline.errors import InvalidRequest
from pipeline.grammars.compiler import Compiler
from pipeline.grammars.grammar import Grammar
from pipeline.grammars.walk import Walk
from pipeline.policy.contract import Capabilities, check_request
from pipeline.policy.params import SamplingParams
from pipeline.prompts import Prompted, token_ids_of


def policies_of(prompts: Sequence[Prompted], params: Any) -> list[SamplingParams]:
    """The parameters of every prompt, of one for all, one a prompt, or None.

    Raises:
        InvalidRequest: They don't match, or aren't what they should be.
    """
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts={prompts!r}, expected a list of prompts: put a single one in a list")
    if params is None:
        params = SamplingParams()
    if not isinstance(params, (SamplingParams, Sequence)):
        raise InvalidRequest(f"params={params!r}, expected SamplingParams, or a list of them")
    policies = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(policies) != len(prompts):
        raise InvalidRequest(f"{len(policies)} params for {len(prompts)} prompts, expected one for all or one each")
    for policy in policies:
        if not isinstance(policy, SamplingParams):
            raise InvalidRequest(f"params={policy!r}, expected SamplingParams")
    return policies


class Intake:
    """Queues prompts of one pipeline, with this state.

    Attributes:
        num_tickets: Tickets handed out so far: 0 to `num_tickets` - 1.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._grammars = Compiler(state.target)
        self.num_tickets = 0

    def ticket(self) -> int:
        """The next prompt's number."""
        self.num_tickets += 1
        return self.num_tickets - 1

    def encode(self, prompt: Prompted) -> np.ndarray:
        """The token ids of a prompt, int32 [n]. Changes nothing: it may be done ahead.

        Raises:
            InvalidRequest: It isn't a prompt of this target's.
        """
        return token_ids_of(prompt, self._state.target)

    def check(self, token_ids: np.ndarray, params: SamplingParams, can: Capabilities) -> None:
        """Hold a prompt's token ids against what the pipeline can do now.

        Raises:
            InvalidRequest: It can't be served exactly as asked.
        """
        check_request(token_ids, params, can)
        if isinstance(params.grammar, Grammar):
            self._grammars.compile(params.grammar)

    def enqueue(self, ticket: int, token_ids: np.ndarray, params: SamplingParams, index: int, number: int) -> None:
        """Put a prompt's samples behind those that wait.

        Args:
            ticket: From `ticket`.
            token_ids: From `encode`, and checked.
            index: The prompt's, in its rollouts.
            number: Of its parameters, among the distinct ones of its call.
        """
        seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        prompt = Prompt(token_ids, ticket, index, unstarted=set(range(params.n)))
        target, walk = self._state.target, self._walks(params)
        self._state.waiting.extend(
            Request(
                prompt=prompt,
                sample_index=i,
                params=params,
                params_index=number,
                seed=sample_seed,
                scanner=StopScanner(params, target.eos_token_ids, target.tokenizer),
                grammar=walk(),
            )
            for i, sample_seed in enumerate(gpu.sample_seeds(seed, params.n))
        )

    def _walks(self, params: SamplingParams) -> Callable[[], Walk | None]:
        """What makes a sample's way through its grammar, None without one; the grammar is compiled once."""
        if not isinstance(params.grammar, Grammar):
            return lambda: None
        target, compiled = self._state.target, self._grammars.compile(params.grammar)
        endings = () if params.ignore_eos else target.eos_token_ids
        return lambda: Walk(compiled, target.vocab_size, endings)
