"""Targets: causal language models of transformers, run row by row over a `RowCache`.

`load_target` finds the checkpoint, refuses what the per-row cache can't represent, and loads it with
every tensor accounted for. `Target` is what the pipeline and the drafts see of it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from model_loaders.demo_model import demo_target_folder
from model_loaders.errors import CheckpointError
from model_loaders.file_checks import num_elements, refuse_larger_model
from model_loaders.kv_cache import RowCache, Slots
from model_loaders.layers.attention import ATTENTION, additive_mask, prepared_mask
from model_loaders.layers.compact import Compact, compact_rows
from model_loaders.layers.fused_norm import fuse_norms
from model_loaders.layers.lean_layer import lean_layers
from model_loaders.layers.packed_linear import pack_linears
from model_loaders.layers.taps import LayerTaps
from model_loaders.target_checkpoint import (
    TOKENIZER_FILES,
    Checkpoint,
    explained,
    find_checkpoint,
    load_tokenizer,
    other_dtypes,
    read_config,
    refuse_other_dtypes,
    refuse_unsupported,
    refuse_wrong_tensors,
    weight_files,
)

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
        self._num_heads: int = getattr(self.config, "num_attention_heads", 0)
        self.max_position: int | None = getattr(self.config, "max_position_embeddings", None)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.logits_dtype: torch.dtype = self.dtype  # until the probe has seen some
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.num_weight_updates = 0
        self.layers = _decoder_layers(model, self.num_layers)
        self._weight_files = tuple(weight_files)
        self._lean = lean_layers(model, self.layers) > 0 if self.device.type == "cuda" else False
        self._taps = LayerTaps(self.layers, ())
        self._compiled: Any = None
        self._key_index = torch.arange(0, device=self.device)
        accepted = inspect.signature(model.forward).parameters
        # transformers 5.2x renamed the argument.
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._packs_heads = self.device.type == "cuda"
        self._can_keep_last = "logits_to_keep" in accepted
        self._num_kv_heads, self._head_dim, self._value_head_dim = self._probe_cache_shape()

    @cached_property
    def sha256(self) -> str | None:
        """SHA-256 of the weight files, computed at the first use; None where they aren't known.

        One file: its own hash. Several: the hash of `sha256sum`'s listing of them, sorted by name.
        """
        if not self._weight_files:
            return None
        hashes = {path.name: sha256_of(path) for path in self._weight_files}
        if len(hashes) == 1:
            return next(iter(hashes.values()))
        listing = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))
        return hashlib.sha256(listing.encode()).hexdigest()

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
        taps = LayerTaps(self.layers, layer_ids, overwritten=self._lean)
        self._taps.remove()
        self._taps = taps
        self._compiled = None  # the compiler doesn't look at hooks again

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
        mask = self._mask(positions, kv_length)
        if self._packs_heads:
            mask = prepared_mask(mask, self._num_heads, self._num_kv_heads, self.dtype)
        else:
            mask = additive_mask(mask, self.dtype)
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

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies new values into the named weights, in place; names are the model's state_dict keys.

        All names, shapes and dtypes are checked first, so a refused call changes nothing. Cached keys and values of
        the old weights are the caller's to drop. Raises CheckpointError naming the key.
        """
        own = self.model.state_dict()
        for key, value in tensors.items():
            if key not in own:
                raise CheckpointError(f"{key}: unexpected tensor, expected one of the target's {len(own)} keys")
            if own[key].shape != value.shape:
                raise CheckpointError(f"{key}: shape {list(value.shape)}, expected {list(own[key].shape)}")
            if not value.is_floating_point():
                raise CheckpointError(f"{key}: dtype {value.dtype}, expected a floating one")
        for key, value in tensors.items():
            own[key].copy_(value)
        self.num_weight_updates += 1

    def _mask(self, positions: torch.Tensor, kv_length: int) -> torch.Tensor:
        """Boolean [b, 1, w, kv_length]: True where the entry's index is at most the query's position."""
        if self.device.type == "cuda":  # a kept index could move under a captured graph
            return torch.arange(kv_length, device=self.device) <= positions[:, None, :, None]
        if self._key_index.shape[0] < kv_length:
            self._key_index = torch.arange(2 * kv_length, device=self.device)
        return self._key_index[:kv_length] <= positions[:, None, :, None]

    def _need_tokenizer(self, method: str) -> Any:
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.name}: no tokenizer files, expected one of {', '.join(TOKENIZER_FILES)} for {method}(): "
                "add them to the checkpoint's folder, or pass prompts as token ids"
            )
        return self.tokenizer

    @torch.inference_mode()
    def _probe_cache_shape(self) -> tuple[int, int, int]:
        """(kv_heads, key width, value width), seen by running one token: configs name them in many ways."""
        probe = _ProbeCache()
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        output = self.model(
            input_ids=zero,
            position_ids=zero,
            attention_mask=self._mask(zero, 1),
            use_cache=True,
            **{self._cache_argument: probe},
        )
        if sorted(probe.shapes) != list(range(self.num_layers)):
            raise CheckpointError(
                f"{self.name}: {len(probe.shapes)} of {self.num_layers} layers keep keys and values, expected all: "
                "layers that share or recur can't be represented by the per-row cache"
            )
        if output.logits.isnan().any():
            raise CheckpointError(
                f"{self.name}: the logits of one token are NaN in {self.dtype}, expected numbers: a weight or a number "
                "of config.json isn't finite"
            )
        self.logits_dtype = output.logits.dtype
        shapes = set(probe.shapes.values())
        if len(shapes) != 1:
            raise CheckpointError(
                f"{self.name}: layers with different attention shapes {sorted(shapes)}, expected one shape"
            )
        return shapes.pop()


class _ProbeCache(Cache):
    """Holds nothing; notes each layer's (kv_heads, key width, value width)."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states


def load_target(
    name: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
) -> Target:
    """Loads a target: "demo", a hub name, a folder with safetensors, a .gguf file or a folder with one.

    Args:
        device: "auto" is CUDA where there is one, else the CPU.
        dtype: "auto" is bfloat16 on CUDA, float32 on the CPU.
        revision: a hub branch, tag or commit.

    Safetensors and GGUF only, and no code from a checkpoint is ever run. Raises CheckpointError for a
    checkpoint that isn't found, has other files, has missing, unexpected or misshapen tensors, or is of an
    architecture that the per-row cache can't represent: sliding or chunked windows, recurrent layers,
    attention sinks, soft-capped attention, length-dependent rotary scaling, encoder-decoders, multimodal
    models.
    """
    asked = str(name)
    if asked == "demo":
        name = demo_target_folder()
    device = _resolve_device(device)
    dtype = _resolve_dtype(dtype, device)
    with explained(f"{asked}: not usable as a target"):
        found = find_checkpoint(str(name), revision)
        config = read_config(found)
        refuse_unsupported(config, asked)
        files = weight_files(found)
        with explained(f"{asked}: not loadable by transformers as a causal language model"):
            refuse_larger_model(
                lambda: AutoModelForCausalLM.from_config(config, trust_remote_code=False), num_elements(files), asked
            )
        model = _load_model(found, files, config, device, dtype, asked)
        return Target(
            model,
            load_tokenizer(found),
            name=asked,
            revision=found.revision,
            weight_files=files,
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _resolve_device(device: str | torch.device) -> torch.device:
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}, expected 'auto', 'cpu' or 'cuda[:index]'") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, expected 'auto' or 'cpu': torch sees no CUDA device here")
    return found


def _resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    if found is None:
        raise ValueError(f"dtype={dtype!r}, expected 'auto', 'float32', 'bfloat16' or 'float16'")
    return found


def _load_model(
    found: Checkpoint, files: Sequence[Path], config: Any, device: torch.device, dtype: torch.dtype, name: str
) -> Any:
    arguments = found.hub_arguments
    if found.gguf_file:
        arguments["gguf_file"] = found.gguf_file
    else:
        arguments["use_safetensors"] = True
    if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        arguments["device_map"] = {"": device}  # straight to the device, without a copy in host memory
    others = {} if found.gguf_file else other_dtypes(files)
    with explained(f"{name}: not loadable by transformers as a causal language model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            found.source,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, with our message
            **arguments,
        )
    model, info = loaded
    refuse_other_dtypes({key: value for key, value in others.items() if not _is_skipped(model, key)})
    refuse_wrong_tensors(info, name)
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
        raise CheckpointError(
            f"{name}: {type(model).__name__}, expected a model whose attention goes through transformers' attention "
            "interface and whose only state is keys and values"
        )
    model.set_attn_implementation(ATTENTION)
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        pack_linears(model)
    fuse_norms(model)
    return model


def _is_skipped(model: Any, key: str) -> bool:
    """Whether a checkpoint's tensor is one of those, masks of older checkpoints, that the model doesn't load."""
    own = model.state_dict().keys()
    if key in own or f"{model.base_model_prefix}.{key}" in own:
        return False
    return any(re.search(pattern, key) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def _eos_token_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    ids: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        values = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in values):
            raise CheckpointError(f"{type(source).__name__}: eos_token_id={value!r}, expected an integer or several")
        ids.update(values)
    return frozenset(ids)


def _decoder_layers(model: Any, num_layers: int) -> list[nn.Module]:
    decoder = model.get_decoder()
    for attribute in ("layers", "h", "blocks"):
        layers = getattr(decoder, attribute, None)
        if isinstance(layers, nn.ModuleList) and len(layers) >= num_layers:
            return list(layers)
    raise CheckpointError(
        f"{type(model).__name__}: no list of {num_layers} decoder layers found, expected one named layers, h or blocks"
    )
