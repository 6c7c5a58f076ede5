"""A target as the pipeline and the drafts see it: a causal language model of transformers, run row by row."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from model_loaders.errors import CheckpointError
from model_loaders.kv_cache import RowCache, Slots
from model_loaders.layers.compact import Compact, compact_rows
from model_loaders.layers.lean_layer import lean_layers
from model_loaders.layers.operators import Operators
from model_loaders.layers.packed_linear import has_packed
from model_loaders.layers.taps import LayerTaps
from model_loaders.targets.causal_masks import CausalMasks
from model_loaders.targets.checkpoint import TOKENIZER_FILES
from model_loaders.targets.identity import config_text, sha256_of_parts, tokenizer_text
from model_loaders.targets.model_facts import decoder_layers, eos_token_ids, probe
from model_loaders.targets.weights import copy_weights, sha256_of_all

_KEY_BLOCK = 64

COMPILING: dict[str, Any] = {"fullgraph": True, "dynamic": False}
"""How `Target.forward` has torch compile the model, where it is asked to: every shape by itself."""

_MOST_SHAPES = 256


@dataclass(frozen=True)
class TargetOutput:
    """One target forward.

    logits: [b, w, V], or [b, 1, V] with last_only; the model's dtype.
    features: [b, w, taps * hidden] in the order of the taps' ids, or None without taps.
    """

    logits: torch.Tensor
    features: torch.Tensor | None


class Target:
    """A loaded causal language model in eval mode without gradients; made by `load_target`.

    Attributes:
        model: the transformers model; tokenizer: its tokenizer, or None where the checkpoint has none.
        config: the model's text config. name: as asked for. revision: the hub's commit hash, or None.
        vocab_size: the width of the logits. hidden_size, num_layers: of the decoder.
        max_position: the longest position count the model was made for, or None where it doesn't say.
        eos_token_ids: every end id of generation_config, config and tokenizer.
        device, dtype: of the weights. logits_dtype: of what `forward` returns.
        num_weight_updates: calls of `load_weights` since loading; `sha256` describes the weights at 0.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        *,
        name: str,
        revision: str | None = None,
        weight_files: Sequence[Path] = (),
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.config = model.config.get_text_config()
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.max_position: int | None = getattr(self.config, "max_position_embeddings", None)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.eos_token_ids = eos_token_ids(model, tokenizer)
        self.num_weight_updates = 0
        self.layers = decoder_layers(model, self.num_layers)
        self._weight_files = tuple(weight_files)
        self._compiled: Any = None
        accepted = inspect.signature(model.forward).parameters
        # transformers 5.2x renamed the argument.
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._can_keep_last = "logits_to_keep" in accepted
        probed = probe(model, self.num_layers, self._cache_argument, name)
        self.logits_dtype = probed.logits_dtype
        self._num_kv_heads, self._head_dim = probed.num_kv_heads, probed.head_dim
        self._value_head_dim = probed.value_head_dim
        # After the probe, which leaves packed copies behind. On a CPU only with packed products: others' last bits
        # depend on how many rows and columns there are.
        lean = self.device.type == "cuda" or has_packed(model)
        self._lean = lean_layers(model, self.layers) if lean else None
        self._taps = LayerTaps(self.layers, ())
        heads = getattr(self.config, "num_attention_heads", 0)
        self._masks = CausalMasks(heads, self._num_kv_heads, self.dtype, self.device)

    @cached_property
    def sha256(self) -> str | None:
        """SHA-256 of the weight files, computed at the first use; None where they aren't known.

        One file: its own hash. Several: the hash of `sha256sum`'s listing of them, sorted by name.
        """
        return sha256_of_all(self._weight_files)

    @property
    def config_sha256(self) -> str:
        """SHA-256 of what else decides its tokens: configuration, tokenizer, chat template and end ids, as they are.

        It doesn't depend on the folder, the dtype or the device.
        """
        template = getattr(self.tokenizer, "chat_template", None)  # which users may set
        return sha256_of_parts(self._loaded_sha256, template, sorted(self.eos_token_ids))

    @cached_property
    def _loaded_sha256(self) -> str:
        return sha256_of_parts(config_text(self.model.config), tokenizer_text(self.tokenizer))

    def new_cache(self, num_slots: int, max_length: int) -> RowCache:
        """A cache for `num_slots` rows of up to `max_length` entries, rejected ones included."""
        return RowCache(
            self.num_layers,
            self._num_kv_heads,
            self._head_dim,
            value_head_dim=self._value_head_dim,
            num_slots=num_slots,
            max_length=max_length,
            dtype=self.dtype,
            device=self.device,
        )

    def set_taps(self, layer_ids: Sequence[int]) -> None:
        """Chooses the layers whose outputs `forward` returns; [] takes the hooks off. See taps.py.

        Layer id L is the output of decoder layer L, -1 the input of layer 0; the last layer's entry is
        taken before the final norm. Raises ValueError for an id outside -1..num_layers-1.
        """
        if tuple(layer_ids) == self._taps.layer_ids:
            return
        taps = LayerTaps(self.layers, layer_ids, overwritten=self._lean is not None)
        self._taps.remove()
        self._taps = taps
        self._compiled = None  # the compiler doesn't look at hooks again

    def use_operators(self, operators: Operators | None) -> None:
        """Computes what lies between the layers' products by these, where there are layers that can; None: by torch.

        On CUDA only. The last bits may differ, so that all who generate from a target should use the same.
        """
        if self._lean is not None:
            self._lean.operators = operators

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        """The ids set by `set_taps`."""
        return self._taps.layer_ids

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: RowCache,
        slots: Slots = None,
        last_only: bool | torch.Tensor = False,
        kv_length: int | None = None,
        lengths: Sequence[int] | None = None,
        compiled: bool = False,
    ) -> TargetOutput:
        """Runs w tokens of each of b rows on top of what their slots hold, and stores their entries.

        Args:
            token_ids: int64 [b, w].
            positions: int64 [b, w], absolute; distinct within a row. A row's tokens attend to its slot's
                entries at positions up to their own, so every earlier position must have been written.
                Padding a short row to w: put it after the row's tokens, at the positions that follow; its
                entries are overwritten when the row gets there.
            cache: from `new_cache`.
            slots: the b rows' slots; None: 0..b-1. See `RowCache.begin`.
            last_only: logits of the last of the w rows only; int64 [1] on the device: of the row with this index.
            kv_length: a number above every position, known to the host; None computes it, which costs a
                synchronisation when positions are on a GPU.
            lengths: how many of each row's w tokens are run, 0 to w; None: all. The others cost nothing: they
                are left out of the model's forward and of the cache, their logits are NaN, their features 0.
                Not with last_only.
            compiled: run what `torch.compile` makes of the model for these shapes and this kv_length, which takes a
                minute or more at their first use. Not with lengths; the last bits may differ.

        The logits are the model's own (soft-capping and scaling included), not upcast. What comes back are
        inference tensors: clone them outside inference mode before training on them.

        Raises ValueError (`name=value, expected ...`) for wrong shapes, slots or lengths.
        """
        if token_ids.ndim != 2 or token_ids.dtype != torch.int64 or token_ids.numel() == 0:
            raise ValueError(f"token_ids={token_ids.dtype} {list(token_ids.shape)}, expected int64 [b, w]")
        if positions.shape != token_ids.shape:
            raise ValueError(f"positions={list(positions.shape)}, expected {list(token_ids.shape)}")
        if kv_length is None:
            kv_length = int(positions.max()) + 1
        # The number of (hidden) keys beyond a row's own changes the last bits of its result unless it comes
        # in whole blocks: rounding up keeps a row's logits independent of its longer neighbours.
        kv_length = min(-(-kv_length // _KEY_BLOCK) * _KEY_BLOCK, max(kv_length, cache.max_length))
        compact = None if lengths is None else self._compact(lengths, token_ids.shape, last_only)
        kv_length = cache.begin(positions, slots, kv_length=kv_length, kept=None if compact is None else compact.kept)
        token_ids = token_ids.to(self.device, non_blocking=True)
        positions = positions.to(self.device, non_blocking=True)
        mask = self._masks.of(positions, kv_length)
        if compact is not None:
            token_ids, positions = compact.take(token_ids), compact.take(positions)
        keep_last = last_only is not False and self._can_keep_last
        if compiled and lengths is not None:
            raise ValueError(f"lengths={list(lengths)}, expected None for a compiled forward")
        model = self._compiled_model if compiled else self.model
        with compact_rows(compact):
            output = model(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{self._cache_argument: cache},
                **({"logits_to_keep": 1 if last_only is True else last_only} if keep_last else {}),
            )
        logits, features = output.logits, self._taps.features()
        if last_only is not False and not keep_last:
            logits = logits[:, -1:] if last_only is True else logits[:, last_only]
        if compact is not None:
            logits = compact.spread(logits, torch.nan)
            features = None if features is None else compact.spread(features, 0.0)
        return TargetOutput(logits, features)

    def _compiled_model(self, **arguments: Any) -> Any:
        from torch._dynamo import config  # slow to import

        if self._compiled is None:
            self._compiled = torch.compile(self.model, **COMPILING)
        with config.patch(recompile_limit=_MOST_SHAPES):
            return self._compiled(**arguments)

    def _compact(self, lengths: Sequence[int], shape: torch.Size, last_only: bool | torch.Tensor) -> Compact | None:
        """The rows to run of a block [b, w]; None for all of them."""
        batch, width = shape
        if (
            last_only is not False
            or len(lengths) != batch
            or not all(0 <= n <= width for n in lengths)
            or not any(lengths)
        ):
            raise ValueError(f"lengths={list(lengths)}, expected {batch} from 0 to {width}, and no last_only")
        return Compact.of(lengths, width, self.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's input embeddings: int64 [...] -> [..., hidden]. Differentiable with respect to none."""
        return self.model.get_input_embeddings()(token_ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's lm_head alone: [..., hidden] -> [..., V], no norm, soft-capping or scaling.

        Gradients pass through to `hidden`.
        """
        return self.model.get_output_embeddings()(hidden)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat by the tokenizer's template, ready for the assistant's answer.

        Raises CheckpointError without a tokenizer or a chat template.
        """
        tokenizer = self._need_tokenizer("render_chat")
        if not tokenizer.chat_template:
            raise CheckpointError(
                f"{self.name}: the tokenizer has chat_template=None, expected a template: pass prompts as text or "
                "token ids, or set target.tokenizer.chat_template"
            )
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return [int(i) for i in ids]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the tokenizer's own special tokens (a BOS where it adds one)."""
        return list(self._need_tokenizer("encode")(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        tokenizer = self._need_tokenizer("decode")
        return tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies new values into the named weights, in place; names are the model's state_dict keys.

        All names, shapes and dtypes are checked first, so a refused call changes nothing. Cached keys and values of
        the old weights are the caller's to drop. Raises CheckpointError naming the key.
        """
        copy_weights(self.model, tensors)
        self.num_weight_updates += 1

    def _need_tokenizer(self, method: str) -> Any:
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.name}: no tokenizer files, expected one of {', '.join(TOKENIZER_FILES)} for {method}(): "
                "add them to the checkpoint's folder, or pass prompts as token ids"
            )
        return self.tokenizer
