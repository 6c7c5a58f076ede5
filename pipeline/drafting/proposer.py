"""The contract as an interface: a speculative method that proposes from tokens alone. Subclass `Proposer`.

A draft model (`model_loaders.drafts.BlockDraft`) makes the same declaration and reads the target's features besides.
`pipeline.testing.check_proposer` holds a method against what it declares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from pipeline.errors import InvalidRequest


@dataclass(frozen=True)
class Contexts:
    """What a proposal is made from, B requests of a round; D: the proposer's `num_drafts`.

    Attributes:
        token_ids: int32 [B, L]: prompt and output so far of request b in ``token_ids[b, :lengths[b]]``, -1 behind. The
            newest token, the anchor, is the last of them.
        lengths: int32 [B], at least 1.
        temperatures: float32 [B]; 0 for a request that gets its most probable drafts, chosen, not drawn.
        uniforms: float64 [B, D] in (0, 1): coins of the proposal's own, draft k's in column k; the verification has
            others.
        vocab_size: V; drafts are below it.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    temperatures: np.ndarray
    uniforms: np.ndarray
    vocab_size: int

    def of(self, b: int) -> np.ndarray:
        """Request b's tokens, int32 [lengths[b]]."""
        return self.token_ids[b, : self.lengths[b]]


@dataclass(frozen=True)
class Proposed:
    """The drafts of a round.

    Attributes:
        tokens: Integers [B, D].
        num_drafts: Integers [B] in 0..D; None: D for all. What lies behind isn't read.
        probs: float32 [B, D, V]: the law that each draft was drawn from, given the drafts before it; one-hot for one
            that was chosen. None: all were chosen.
    """

    tokens: np.ndarray
    num_drafts: np.ndarray | None = None
    probs: np.ndarray | None = None


class NoCache:
    """The cache of a method that reads none of the target's features: there is nothing in it."""

    def reserve(self) -> None:
        """Nothing."""

    def release(self, slot: int) -> None:
        """Nothing."""

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Nothing."""

    def snapshot(self, slot: int, length: int) -> None:
        """Nothing."""

    def restore(self, slot: int, row: None) -> None:
        """Nothing."""


class ReadsNoFeatures:
    """What a draft model does with the target's features, for a method that has no use for them."""

    target_layer_ids: ClassVar[tuple[int, ...]] = ()

    def new_cache(self, num_slots: int, max_length: int) -> NoCache:
        """An empty one."""
        return NoCache()

    def extend(self, features: None, positions: Any, cache: NoCache, slots: Any = None, kv_length: Any = None) -> None:
        """Nothing."""


class Proposer(ReadsNoFeatures, ABC):
    """A speculative method; a subclass gives `method`, `num_drafts`, `propose` and, if it holds, `mask_contract`.

    `mask_contract` is the declaration. With True the method promises, for every draft k of a request:

    1. Without the coins. The draft, and whether there is one, come from tokens, models and ``Contexts.uniforms``, never
       from the request's seed, whose other coins verify the draft.
    2. With its law. Where ``Proposed.probs`` is given, draft k was drawn from its row k, given the drafts before it,
       and from nothing else. A draft without a law may be chosen in any way.
    3. Lengths that don't look ahead. Whether a drawn draft k is proposed depends on the context and the drafts before
       it only, not on draft k or later ones.

    Then every committed token follows the target's policy (`gpu/verification/verify.py` has the rules and why), and
    masks are exact. A method that doesn't declare it generates, and its mask requests are refused. A proposal should
    also depend on its own request only: then so does the output, whatever the batch.

    With `captured` it promises `propose_captured` too, and runs inside the rounds of `pipeline.engine`; else rounds run
    stage by stage. A subclass that overrides `propose` alone is not captured.

    Attributes:
        method: Its name, in capabilities and provenance.
        num_drafts: D, the most drafts a round.
        draws_by_default: Whether sampled requests get temperatures above 0 unless the pipeline's `proposal` says
            otherwise.
    """

    method: str
    num_drafts: int
    mask_contract: bool = False
    draws_by_default: bool = False
    # Any draft can be verified exactly against its law, or as a chosen one.
    sampling_verify_available: ClassVar[bool] = True
    captured: ClassVar[bool] = False
    has_confidence: ClassVar[bool] = False
    revision: ClassVar[None] = None
    sha256: ClassVar[None] = None
    config_sha256: ClassVar[None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "propose" in cls.__dict__ and "propose_captured" not in cls.__dict__:
            cls.captured = False

    @abstractmethod
    def propose(self, contexts: Contexts) -> Proposed:
        """Drafts behind each request's last token."""

    def propose_captured(self, token_ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafts of `propose`, all chosen: int32 [B, D], and how many of each request's there are, int32 [B].

        Queues work on torch's stream and CuPy's, which are one, and waits for nothing; the same for the same shapes, so
        that a CUDA graph can hold it. All D drafts are below V, whatever their number.

        Args:
            token_ids: int32 [B, L], contiguous: prompt and output so far in ``token_ids[b, :lengths[b]]``.
            lengths: int32 [B], at least 1. A slot without a request has anything.
        """
        raise NotImplementedError(f"{type(self).__name__}.propose_captured: expected of a proposer with captured=True")

    @property
    def name(self) -> str:
        """For provenance."""
        return self.method


def checked(proposed: Any, proposer: Proposer, contexts: Contexts) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """A proposal as the pipeline takes it: tokens int32 [B, D], num_drafts int32 [B], probs float32 [B, D, V] or None.

    Raises:
        InvalidRequest: Other shapes, types or ranges: the proposer is wrong, not a request.
    """
    batch, most, vocabulary = len(contexts.lengths), proposer.num_drafts, contexts.vocab_size
    name = f"{type(proposer).__name__}.propose"
    if not isinstance(proposed, Proposed):
        raise InvalidRequest(f"{name} returned {type(proposed).__name__}, expected a Proposed")
    tokens = np.asarray(proposed.tokens)
    num = np.full(batch, most) if proposed.num_drafts is None else np.asarray(proposed.num_drafts)
    for field, value, shape in (("tokens", tokens, [batch, most]), ("num_drafts", num, [batch])):
        if value.dtype.kind not in "iu" or list(value.shape) != shape:
            raise InvalidRequest(f"{name}: {field}={value.dtype}{list(value.shape)}, expected integers {shape}")
    if ((num < 0) | (num > most)).any():
        raise InvalidRequest(f"{name}: num_drafts={num.tolist()}, expected 0..{most}")
    used = np.arange(most) < num[:, None]
    outside = used & ((tokens < 0) | (tokens >= vocabulary))
    if outside.any():
        b, k = np.argwhere(outside)[0]
        raise InvalidRequest(f"{name}: tokens[{b}, {k}]={tokens[b, k]}, expected ids in [0, {vocabulary})")
    probs = proposed.probs
    if probs is not None:
        probs = np.asarray(probs)
        shape = [batch, most, vocabulary]
        if probs.dtype != np.float32 or list(probs.shape) != shape:
            raise InvalidRequest(f"{name}: probs={probs.dtype}{list(probs.shape)}, expected float32{shape}")
    return np.where(used, tokens, 0).astype(np.int32), num.astype(np.int32), probs
