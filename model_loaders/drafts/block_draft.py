"""A draft as the pipeline sees it: it fills one block of masks a round; cache, features and forward of every method."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_loaders.drafts.backbone import Backbone, DraftConfig, visible
from model_loaders.drafts.proposal import Drafted, Draw, ProposalLaw
from model_loaders.kv_cache import RowCache, Slots


class BlockDraft(ABC):
    """A loaded backbone bound to its target; complete but for a method's ``propose_after``.

    A cache slot holds, for each layer, the keys and values of the committed tokens, each at its position. A
    block is written behind them, at ``start .. start + block_size - 1``, and is never cleaned up. Nothing
    stale can be seen: a row sees only positions below ``start + block_size``; those below ``start`` were
    written by ``extend`` after the block that used them, and the block itself overwrites the rest.

    method: its name. mask_contract: drafts are chosen or drawn without seeing the verification's coins, which exact
    capture needs. sampling_verify_available: sampled requests can be verified exactly. draws_by_default: whether
    sampled requests get drawn proposals unless the pipeline says otherwise. captured: with a ``kv_length`` given and a
    reserved cache, ``propose`` and ``extend`` queue device work only, the same for the same shapes, so that a CUDA
    graph can hold them; a draft that doesn't say so runs in eager rounds. name, revision: as loaded (revision: the
    hub's commit, or None). files: the weight files, for ``sha256``.
    """

    method: str
    # A draft is an argmax, or drawn with uniforms of its own: either way without seeing the verification's coins,
    # and with a law that is known, so sampled requests are verified exactly.
    mask_contract = True
    sampling_verify_available = True
    draws_by_default = True
    captured = True

    def __init__(
        self,
        module: Backbone,
        target: Any,
        *,
        name: str = "",
        revision: str | None = None,
        files: tuple[Path, ...] = (),
    ):
        self.module = module
        self.target = target
        self.name = name
        self.revision = revision
        self.files = files
        module.join()

    @abstractmethod
    def propose_after(self, hidden: Tensor, anchors: Tensor, draw: Draw | None) -> Drafted:
        """The method's proposal from the hidden states [b, D, d] of its drafts; the rest as ``propose``."""

    @property
    def config(self) -> DraftConfig:
        """The module's shape."""
        return self.module.config

    @property
    def block_size(self) -> int:
        """Rows of the draft's own block: the anchor and the masks."""
        return self.config.block_size

    @property
    def num_drafts(self) -> int:
        """Tokens proposed a round; a verify block has one row more.

        The anchor's row proposes one where the draft samples from the anchor.
        """
        return self.config.block_size - (not self.config.sample_from_anchor)

    @property
    def has_confidence(self) -> bool:
        """Whether ``Drafted.confidence`` is there."""
        return False

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The target's layers whose outputs, concatenated in this order, are the features (0: the first)."""
        return self.config.target_layer_ids

    @property
    def mask_token_id(self) -> int:
        """What a block is filled with behind the anchor."""
        return self.config.mask_token_id

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.module.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.module.fc.weight.dtype

    @cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of the weight files in name order, or of the tensors' bytes if it came from no file."""
        digest = hashlib.sha256()
        for path in sorted(self.files):
            with path.open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        if not self.files:
            for name, tensor in sorted(self.module.state_dict().items()):
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def config_sha256(self) -> str:
        """Hex SHA-256 of the configuration."""
        held = json.dumps(asdict(self.config), sort_keys=True, default=str)
        return hashlib.sha256(held.encode()).hexdigest()

    def new_cache(self, num_slots: int, max_length: int) -> RowCache:
        """An empty draft cache. max_length, in tokens, must leave room for a verify block behind the last token."""
        return RowCache(
            self.config.num_layers,
            self.config.num_key_value_heads,
            self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
            num_slots=num_slots,
            max_length=max_length,
            together=True,
        )

    @torch.inference_mode()
    def extend(
        self,
        features: Tensor,
        positions: Tensor,
        cache: RowCache,
        slots: Slots = None,
        kv_length: int | None = None,
    ) -> None:
        """Write the context keys and values of features [b, w, m*d] of tokens at positions int64 [b, w].

        slots, kv_length: as RowCache.begin. Rows that don't belong to a sequence (padding, rejected drafts) are
        harmless while their positions lie at or past its next ``start``: later blocks and later calls overwrite them
        before anything reads them.
        """
        cache.begin(positions, slots, kv_length=kv_length)
        cache.write_layers(*self.module.context_keys_values(features.to(self.dtype), positions))

    @torch.inference_mode()
    def propose(
        self,
        anchors: Tensor,
        starts: Tensor,
        cache: RowCache,
        slots: Slots = None,
        kv_length: int | None = None,
        *,
        draw: Draw | None = None,
    ) -> Drafted:
        """Drafts that follow each row's anchor.

        anchors int64 [b]: the last committed token, which has no features yet. starts int64 [b]: its position,
        that is the number of context entries of the row; every one must have been written by ``extend``.
        kv_length: keys to look at, at least max(starts) + num_drafts + 1; None reads it from starts, which waits for
        a CUDA device (inside a CUDA graph pass a fixed one and ``cache.reserve()`` before).
        draw: draws drafts from the draft's logits; None: all are chosen (argmax), and ``law`` is None.
        """
        hidden = self.hidden(anchors, starts, cache, slots, kv_length)
        return self.propose_after(hidden, anchors, draw)

    @torch.inference_mode()
    def hidden(
        self, anchors: Tensor, starts: Tensor, cache: RowCache, slots: Slots = None, kv_length: int | None = None
    ) -> Tensor:
        """Final hidden states [b, D, d], one a draft, of the blocks behind the anchors; see ``propose``."""
        block = self.block_size
        ids = anchors.new_full((anchors.shape[0], block), self.mask_token_id)
        ids[:, 0] = anchors
        positions = starts.unsqueeze(1) + torch.arange(block, device=starts.device)
        kv_length = cache.begin(positions, slots, kv_length=kv_length)
        masks = self.masks(starts, positions, kv_length)
        hidden = self.module(self.embed(ids), positions, cache.write, masks)
        if self.config.sample_from_anchor:
            return hidden
        # Copied: rows that lie apart would go through a head as a product a block, which reads its weights each time.
        return hidden[:, 1:].contiguous()

    def masks(self, starts: Tensor, positions: Tensor, kv_length: int) -> list[Tensor]:
        """Each layer's mask as ``Backbone.forward`` takes it, n = kv_length; key j of a slot is position j."""
        config, key = self.config, torch.arange(kv_length, device=starts.device)
        made: dict[tuple[bool, int | None], Tensor] = {}
        masks = []
        for layer in range(config.num_layers):
            kind = (config.is_causal(layer), config.window(layer))
            if kind not in made:
                seen = visible(positions, key, starts.unsqueeze(1), self.block_size, *kind)
                made[kind] = config.mask_of(seen.expand(-1, self.block_size, -1), self.dtype)
            masks.append(made[kind])
        return masks

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., d] of ids int64 [...], in the draft's dtype: its own, or the target's."""
        own = self.module.embed_tokens
        embedded = (self.target.embed(ids) if own is None else own(ids)).to(self.dtype)
        return embedded if self.config.embedding_scale == 1 else embedded * self.config.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., n] of hidden states [..., d] by the draft's own head, or the target's.

        n is the draft's vocabulary, the target's unless ``draft_vocab_size`` is set.
        """
        own, cap = self.module.lm_head, self.config.final_logit_softcapping
        logits = self.target.head(hidden) if own is None else own(hidden)
        if own is None and self.module.d2t is not None:
            logits = logits[..., self.proposable]
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def token_of(self, index: Tensor) -> Tensor:
        """The target's tokens of the draft's, int64 [...]: d2t holds the offsets between them."""
        offsets = self.module.d2t
        return index if offsets is None else index + offsets[index]

    @cached_property
    def proposable(self) -> Tensor:
        """The target's token of each of the draft's, int64 [n], where ``draft_vocab_size`` is set."""
        assert self.config.draft_vocab_size is not None
        return self.token_of(torch.arange(self.config.draft_vocab_size, device=self.device))

    @cached_property
    def entry_of(self) -> Tensor:
        """The draft's token of each of the target's, -1 where it has none: int32 [V], with ``draft_vocab_size``."""
        entries = torch.full((self.target.vocab_size,), -1, dtype=torch.int32, device=self.device)
        entries[self.proposable] = torch.arange(len(self.proposable), dtype=torch.int32, device=self.device)
        return entries

    def law(self, logits: Tensor) -> ProposalLaw:
        """The law of logits [b, D, n] over the draft's vocabulary."""
        return ProposalLaw(logits, entry_of=None if self.module.d2t is None else self.entry_of)
