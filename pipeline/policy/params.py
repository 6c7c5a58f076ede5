"""How one request is sampled."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from gpu import GREEDY_TEMPERATURE
from pipeline.errors import InvalidRequest
from pipeline.grammars.grammar import Grammar
from pipeline.policy.names import with_known_names

MAX_SAMPLES = 1 << 20
"""The most samples of one prompt."""

NO_TEXT_FORM = ("logits_processors",)
"""Parameters that a command line or a JSON file can't give."""


@with_known_names("a sampling parameter", "SamplingParams")
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling policy of one request, its limits, and what is recorded of it.

    The policy of a token is: the model's logits, then penalties (`repetition_penalty` over prompt and output;
    `presence_penalty` and `frequency_penalty` over the output), then `logit_bias`, then `logits_processors` in
    order, then `grammar`, then the ban on ending tokens before `min_new_tokens`; divided by `temperature`; filtered
    by `top_k`, `top_p` and `min_p`; renormalised. Each is applied to a verify row with that row's own prefix, the
    drafts before it included. `pipeline.policy.contract` says it once for all.

    Attributes:
        temperature: From 0 to 1e30; below 1e-5 the request is greedy.
        top_k: Keep tokens with fewer than `top_k` others above them, so ties at the cutoff are all kept.
            None: unbounded. 1: greedy.
        top_p: In (0, 1]. Keep the most probable tokens up to the one that crosses `top_p`; 1 is the identity.
        min_p: In [0, 1). Of what `top_k` and `top_p` kept, keep tokens at least `min_p` times as probable as the most
            probable one, both after temperature (Nguyen et al. 2024).
        repetition_penalty: Above 0; 1 is neutral. Divides positive and multiplies negative logits of seen tokens.
        presence_penalty: Subtracted once from every token of the output so far.
        frequency_penalty: Subtracted once an occurrence in the output so far.
        logit_bias: Token id to a number added to its logit; -inf bans a token.
        logits_processors: Callables of transformers' protocol: ``f(input_ids [1, n] int64, scores [1, vocabulary]
            float32) -> scores``, called for every verify row.
        grammar: What the output must be: ``{"json_schema": ...}``, ``{"regex": ...}`` or ``{"ebnf": ...}``. Every
            verify row is restricted to what the grammar allows behind that row's own prefix. Where the grammar may end,
            the end of sequence is allowed, and only there; with `ignore_eos` the output ends, with reason "stop", at
            the token behind which the grammar allows nothing more. Special tokens add no text, so no grammar allows
            them. A schema's JSON may have any whitespace between its parts. A limit may cut the output before the
            grammar's end.
        max_new_tokens: The limit of the output, at least 1. The pipeline's `max_length` may end it earlier, with the
            same reason "length".
        min_new_tokens: No EOS or stop token before so many tokens (unless a grammar allows nothing else), and stop
            strings are not looked for.
        max_time: Seconds; the first round that ends later, counted from when the sample got its slot, is its last, and
            everything that the round committed stays. How many tokens that leaves isn't reproducible. None: no limit.
        stop: Strings that end the output; the text is cut before them. Looked for in the decoded text, which has no
            special tokens: name those in `stop_token_ids`.
        stop_token_ids: Ids that end the output with reason "stop".
        ignore_eos: Go on past the model's end of sequence.
        seed: 64-bit; None draws one, which the rollout records. The result depends on it and on nothing else in
            the batch: equal prompts with equal seeds give equal tokens, so use `n` for several samples.
        n: Samples of the prompt; they share one prefill, and sample i has a seed derived from `seed` and i.
        return_logprobs: Hand out the log-probability of every token under the policy it was drawn from.
        top_logprobs: So many of the policy's largest log-probabilities a token (0: none).
        return_sampling_mask: Record the support of every token's policy.
        sampling_logprobs: With a mask: "selected" records a log-probability a token, "support" one for every
            token of every support.
        record: "audit" records what `pipeline.audit` needs to derive every token again; refused where a mask would
            be. None: nothing.

    Raises:
        InvalidRequest: A value out of range, by name; a name that isn't one of these, with the nearest that is.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logits_processors: Sequence[Any] = ()
    grammar: Grammar | Mapping[str, Any] | None = None
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    max_time: float | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    return_logprobs: bool = True
    top_logprobs: int = 0
    return_sampling_mask: bool = False
    sampling_logprobs: Literal["selected", "support"] = "selected"
    record: Literal["audit"] | None = None

    def __post_init__(self) -> None:
        self._real("temperature", "a number from 0 to 1e30", lambda x: x >= 0 and np.float32(x) <= np.float32(1e30))
        if self.top_k is not None:
            self._integer("top_k", "an integer of at least 1, or None for no bound", 1)
        self._real("top_p", "a number above 0 and at most 1", lambda x: 0 < x <= 1)
        self._real("min_p", "a number of at least 0 and below 1", lambda x: 0 <= x < 1)
        self._real("repetition_penalty", "a finite number above 0 (1: neutral)", lambda x: x > 0)
        self._real("presence_penalty", "a finite number", lambda x: True)
        self._real("frequency_penalty", "a finite number", lambda x: True)
        self._check_bias()
        if isinstance(self.logits_processors, str) or not isinstance(self.logits_processors, Sequence):
            self._refuse("logits_processors", "a sequence of callables (input_ids, scores) -> scores")
        for processor in self.logits_processors:
            if not callable(processor):
                self._refuse("logits_processors", "a sequence of callables (input_ids, scores) -> scores")
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        if self.grammar is not None:
            object.__setattr__(self, "grammar", Grammar.of(self.grammar))
        self._integer("max_new_tokens", "an integer of at least 1", 1)
        self._integer("min_new_tokens", "an integer of at least 0", 0)
        if self.min_new_tokens > self.max_new_tokens:
            self._refuse("min_new_tokens", f"at most max_new_tokens={self.max_new_tokens}")
        if self.max_time is not None:
            seconds = _float(self.max_time)
            if seconds is None or not 0 < seconds < math.inf:
                self._refuse("max_time", "a finite number of seconds above 0, or None for no limit")
            object.__setattr__(self, "max_time", seconds)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            self._refuse("stop", "a non-empty string or a sequence of non-empty strings")
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids
        if not isinstance(ids, (Sequence, Set)) or not all(_is_integer(i) and operator.index(i) >= 0 for i in ids):
            self._refuse("stop_token_ids", "a sequence of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(operator.index(i) for i in self.stop_token_ids))
        if self.seed is not None and not (_is_integer(self.seed) and 0 <= operator.index(self.seed) < 2**64):
            self._refuse("seed", "an integer in [0, 2**64), or None to draw one")
        if self.seed is not None:
            object.__setattr__(self, "seed", operator.index(self.seed))
        self._integer("n", f"an integer from 1 to {MAX_SAMPLES}", 1, MAX_SAMPLES)
        self._integer("top_logprobs", "an integer of at least 0", 0)
        for name in ("ignore_eos", "return_logprobs", "return_sampling_mask"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")
        if self.sampling_logprobs not in ("selected", "support"):
            self._refuse("sampling_logprobs", '"selected" or "support"')
        if self.record not in ("audit", None):
            self._refuse("record", '"audit" or None')

    @cached_property
    def greedy(self) -> bool:
        """Whether every token is the argmax."""
        return bool(np.float32(self.temperature) < GREEDY_TEMPERATURE) or self.top_k == 1

    @cached_property
    def keeps_supports(self) -> bool:
        """Whether the supports of its tokens are recorded, as a mask or for an audit."""
        return self.return_sampling_mask or self.record == "audit"

    @cached_property
    def adjusts(self) -> bool:
        """Whether the logits are changed before sampling, a grammar and the ban on early endings aside."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.logits_processors
        )

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON can hold them; a processor becomes its `repr`, for a reader, not for a re-run."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["logits_processors"] = [repr(processor) for processor in self.logits_processors]
        values["stop"], values["stop_token_ids"] = list(self.stop), list(self.stop_token_ids)
        if isinstance(self.grammar, Grammar):
            values["grammar"] = self.grammar.to_dict()
        if self.logit_bias is not None:
            # JSON has no infinity.
            values["logit_bias"] = {
                str(token): bias if math.isfinite(bias) else str(bias) for token, bias in self.logit_bias.items()
            }
        return values

    def _refuse(self, name: str, expected: str) -> None:
        raise InvalidRequest(f"{name}={getattr(self, name)!r}, expected {expected}")

    def _real(self, name: str, expected: str, holds) -> None:
        # The kernels take float32: what is out of range there is refused here too.
        value, rounded = _float(getattr(self, name)), _float32(getattr(self, name))
        if value is None or rounded is None or not math.isfinite(rounded) or not (holds(value) and holds(rounded)):
            self._refuse(name, expected)
        object.__setattr__(self, name, value)

    def _integer(self, name: str, expected: str, least: int, most: float = math.inf) -> None:
        value = getattr(self, name)
        if not _is_integer(value) or not least <= operator.index(value) <= most:
            self._refuse(name, expected)
        object.__setattr__(self, name, operator.index(value))

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        expected = "a mapping of token ids to numbers below +inf"
        if not isinstance(self.logit_bias, Mapping):
            self._refuse("logit_bias", expected)
        for token, bias in self.logit_bias.items():
            value = _float32(bias)
            if not _is_integer(token) or token < 0 or value is None or not value < math.inf:
                self._refuse("logit_bias", expected)
        # A copy that nobody can change: what was checked is what is used.
        own = {operator.index(token): float(bias) for token, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", MappingProxyType(own))


def _float(value: Any) -> float | None:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.floating, np.integer)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _float32(value: Any) -> float | None:
    """The value in the kernels' precision; None if it isn't a number."""
    exact = _float(value)
    if exact is None:
        return None
    with np.errstate(over="ignore"):
        return float(np.float32(exact))


def _is_integer(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return False
    try:
        operator.index(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
    return True
