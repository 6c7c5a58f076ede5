"""The options of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import gpu
from pipeline.drafting.lengths import DraftLengths
from pipeline.errors import InvalidRequest
from pipeline.policy.names import with_known_names


@with_known_names("an option of the pipeline", "SpeculativePipeline")
@dataclass(frozen=True)
class Options:
    """The options of a pipeline, checked once.

    Attributes:
        max_batch: Slots: requests decoded at once.
        max_length: Tokens of prompt and output together; at most the positions that the target was made for.
        filter_order: "top_k_first" or "joint": one order for sampling, verification and capture.
        max_support: The cap on a captured support.
        allow_unbounded_support: Serve masks without a finite top_k.
        prefill_chunk: Prompt tokens a forward.
        proposal: How a sampled request's drafts come about: "argmax" takes the draft's likeliest tokens, "sample" draws
            them from the draft's law under the request's own policy, "auto" is the method's own way (draft models:
            "sample", prompt lookup: "argmax"). The law of the output is the same; how many drafts are kept is not.
        draft_lengths: How many drafts of a request are verified, by the draft's confidences: a
            `pipeline.ConfidenceThreshold` or `ThroughputSchedule`; None: all. Rows left out aren't computed.
        engine: Where rounds run (see `pipeline.engine`). "graphs": on the device, as CUDA graphs, the host a round
            behind; "overlapped": the same without graphs, on the CPU too; "eager": stage by stage, every record at
            hand; "auto": graphs on CUDA where the draft allows it, else eager. The tokens are the same.
        compile: Have torch compile the target's forward of the engine's rounds. Faster rounds for a minute or more at
            the first use of each shape; it changes the last bits of logits, so tokens may differ from those without.
    """

    max_batch: int = 32
    max_length: int = 4096
    filter_order: str = "top_k_first"
    max_support: int = 4096
    allow_unbounded_support: bool = False
    prefill_chunk: int = 512
    proposal: str = "auto"
    draft_lengths: DraftLengths | None = None
    engine: str = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_length", 2), ("max_support", 1), ("prefill_chunk", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise InvalidRequest(f"{name}={value!r}, expected an integer of at least {least}")
            object.__setattr__(self, name, int(value))
        if self.filter_order not in ("top_k_first", "joint"):
            raise InvalidRequest(f'filter_order={self.filter_order!r}, expected "top_k_first" or "joint"')
        if self.proposal not in ("auto", "argmax", "sample"):
            raise InvalidRequest(f'proposal={self.proposal!r}, expected "auto", "argmax" or "sample"')
        if self.engine not in ("auto", "graphs", "overlapped", "eager"):
            raise InvalidRequest(f'engine={self.engine!r}, expected "auto", "graphs", "overlapped" or "eager"')
        if not isinstance(self.draft_lengths, DraftLengths | None):
            raise InvalidRequest(
                f"draft_lengths={self.draft_lengths!r}, expected a ConfidenceThreshold, a ThroughputSchedule or None"
            )
        for name in ("allow_unbounded_support", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name}={getattr(self, name)!r}, expected True or False")

    def within(self, target: Any, draft: Any = None) -> Options:
        """These options for a pair: `max_length` no longer than the target's positions.

        Raises:
            InvalidRequest: A vocabulary wider than the kernels take, or lengths by confidences that the draft hasn't.
        """
        if self.draft_lengths is not None and not getattr(draft, "has_confidence", False):
            method = None if draft is None else draft.method
            raise InvalidRequest(
                f"draft_lengths={self.draft_lengths!r}, expected None: the draft (method {method!r}) has no confidence "
                "head"
            )
        if self.engine == "graphs" and target.device.type != "cuda":
            raise InvalidRequest(
                f'engine="graphs", expected "auto", "overlapped" or "eager" for a target on {target.device}'
            )
        if target.vocab_size > gpu.MAX_VOCABULARY:
            raise InvalidRequest(f"vocab_size={target.vocab_size}, expected at most {gpu.MAX_VOCABULARY}")
        return replace(self, max_length=min(self.max_length, target.max_position or self.max_length))
