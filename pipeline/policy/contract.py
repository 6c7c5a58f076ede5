"""Which requests can be served exactly, and which are refused, with the reason.

A mask, or the record of an audit, is only worth having when every committed token really is a sample of the recorded
distribution. What a policy may contain, and still be recorded exactly: anything that is a function of the model's
logits and of the tokens before the row, drafts included. Every path, ordinary or speculative, on the host or a device,
applies to each row in this order:

1. repetition, frequency and presence penalties; 2. `logit_bias`; 3. `logits_processors`, as they are listed;
4. `grammar`; 5. no ending before `min_new_tokens`; 6. division by `temperature`; 7. `top_k` and `top_p` in the
pipeline's `filter_order`; 8. `min_p`; 9. renormalisation.

Step 8 compares with the row's largest probability, which every filter keeps, so it takes the same tokens before and
after renormalising; it comes after step 7, whose top_p counts the mass that min_p then drops (transformers' order). A
greedy request takes the argmax after step 5.

What breaks the record is refused here, before the request starts:

- a speculative method that doesn't declare how its drafts come about (`drafting/proposer.py` has the three promises);
- acceptance thresholds other than 1.0, simulated acceptance, or a verify stage that doesn't keep the law;
- unbounded top_k, unless the pipeline was built with ``allow_unbounded_support=True``;
- a sampled request, masked or not, on a pair that can only verify greedily.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import numpy as np

from pipeline.errors import InvalidRequest, short
from pipeline.policy.params import SamplingParams


@dataclass(frozen=True)
class Capabilities:
    """What the loaded pair and the pipeline's options can do.

    Attributes:
        method: The draft's method, "dflash" for one; None: ordinary decoding.
        block_size: The most rows of a verify block (anchor and drafts); 1 for ordinary decoding.
        sampling_verify_available: Whether sampled requests can be verified exactly; if not, only greedy ones are
            served.
        mask_contract: Whether the method declares what exact capture needs: drafts without the verification's coins,
            with their laws, and lengths that don't look ahead.
        law_preserved: Whether the verify stage in place keeps the target's law at thresholds of 1.0.
        threshold_single, threshold_acc: The acceptance thresholds; 1.0 is exact.
        filter_order: "top_k_first" or "joint".
        max_support: The cap on a captured support.
        allow_unbounded_support: Whether masks without a finite top_k are served.
        max_length: Tokens of prompt and output together.
        vocab_size: The width of the logits.
        has_tokenizer: Whether text can be encoded, decoded and searched.
        captured: Whether rounds run as CUDA graphs; a batch that needs the host between rounds (`pipeline.engine.
            why_eager`) runs stage by stage even then.
    """

    method: str | None
    block_size: int
    sampling_verify_available: bool
    mask_contract: bool
    law_preserved: bool
    threshold_single: float
    threshold_acc: float
    filter_order: str
    max_support: int
    allow_unbounded_support: bool
    max_length: int
    vocab_size: int
    has_tokenizer: bool
    captured: bool = False

    @classmethod
    def of(cls, state: Any, verify: Any, captured: bool) -> Capabilities:
        """Under a pipeline's `State`, the verify stage in place, and its engine."""
        options = state.options
        return cls(
            method=None if state.draft is None else state.draft.method,
            block_size=state.block_size,
            sampling_verify_available=getattr(state.draft, "sampling_verify_available", True),
            mask_contract=state.draft is None or getattr(state.draft, "mask_contract", False),
            law_preserved=getattr(verify, "preserves_law", False),
            threshold_single=state.threshold_single,
            threshold_acc=state.threshold_acc,
            filter_order=options.filter_order,
            max_support=options.max_support,
            allow_unbounded_support=options.allow_unbounded_support,
            max_length=options.max_length,
            vocab_size=state.target.vocab_size,
            has_tokenizer=state.target.tokenizer is not None,
            captured=captured,
        )

    @property
    def masks_available(self) -> bool:
        """Whether any request can have a mask."""
        return self.mask_contract and self.law_preserved and self.threshold_single == self.threshold_acc == 1.0

    def to_dict(self) -> dict[str, Any]:
        """The fields, for provenance."""
        return asdict(self)


def check_request(prompt_ids: np.ndarray, params: SamplingParams, can: Capabilities) -> None:
    """Refuse what can't be served exactly as asked.

    Args:
        prompt_ids: int [n].
        params: Validated in themselves; here they meet the loaded pair.
        can: The pipeline's capabilities.

    Raises:
        InvalidRequest: Why not, and what to do.
    """
    _check_prompt(prompt_ids, can)
    _check_ids(params, can)
    if params.stop and not can.has_tokenizer:
        raise InvalidRequest(
            f"stop={params.stop!r}, expected no stop strings: the target has no tokenizer; use stop_token_ids"
        )
    if params.grammar is not None and not can.has_tokenizer:
        raise InvalidRequest(f"grammar={short(params.grammar)}, expected None: the target has no tokenizer")
    if not params.greedy and not can.sampling_verify_available:
        raise InvalidRequest(
            f"temperature={params.temperature!r}, expected 0: the draft method {can.method!r} can only be verified "
            "greedily; use temperature=0, another draft, or draft=None"
        )
    if params.keeps_supports:
        _check_mask(params, can)


def check_thresholds(single: float, acc: float) -> None:
    """Refuse acceptance thresholds out of range.

    Raises:
        InvalidRequest: A threshold outside (0, 1].
    """
    for name, value in (("single", single), ("acc", acc)):
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value <= 1:
            raise InvalidRequest(f"{name}={value!r}, expected a number above 0 and at most 1 (1: exact)")


def _check_prompt(prompt_ids: np.ndarray, can: Capabilities) -> None:
    if len(prompt_ids) == 0:
        raise InvalidRequest("prompt=[], expected at least one token")
    outside = prompt_ids[(prompt_ids < 0) | (prompt_ids >= can.vocab_size)]
    if len(outside):
        raise InvalidRequest(f"prompt token={outside[0]}, expected ids in [0, {can.vocab_size})")
    if len(prompt_ids) >= can.max_length:
        raise InvalidRequest(
            f"prompt length={len(prompt_ids)}, expected less than max_length={can.max_length}; shorten the prompt or "
            "build the pipeline with a larger max_length"
        )


def _check_ids(params: SamplingParams, can: Capabilities) -> None:
    for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if token >= can.vocab_size:
                raise InvalidRequest(f"{name} token={token}, expected ids in [0, {can.vocab_size})")
    if params.top_logprobs > can.vocab_size:
        raise InvalidRequest(f"top_logprobs={params.top_logprobs}, expected at most the vocabulary, {can.vocab_size}")


def _check_mask(params: SamplingParams, can: Capabilities) -> None:
    asked, without = "return_sampling_mask=True", "False"
    if not params.return_sampling_mask:
        asked, without = f"record={params.record!r}", "None"
    if not can.mask_contract:
        raise InvalidRequest(
            f"{asked}, expected {without}: the draft method {can.method!r} doesn't implement the sampling-mask "
            "contract; use a draft that does, or draft=None"
        )
    if not can.law_preserved:
        raise InvalidRequest(
            f"{asked}, expected {without}: the verify stage simulates acceptance or doesn't keep the target's law; "
            "put the library's own verify stage back"
        )
    if can.threshold_single != 1.0 or can.threshold_acc != 1.0:
        raise InvalidRequest(
            f"{asked}, expected {without} while the acceptance thresholds are single={can.threshold_single} and "
            f"acc={can.threshold_acc}: only 1.0 is exact; call set_accept_thresholds(1.0, 1.0)"
        )
    if params.top_k is None and not params.greedy and not can.allow_unbounded_support:
        raise InvalidRequest(
            f"top_k=None, expected a finite top_k for a mask; set one, or build the pipeline with "
            f"allow_unbounded_support=True (then bounded by max_support={can.max_support})"
        )
