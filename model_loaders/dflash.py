"""The DFlash draft: a few Qwen3-style layers that fill a block of masks in one forward.

Source: DFlash, arXiv 2602.06036, section 3. The draft sees the target's hidden states ("features") of the
committed tokens as keys and values, and fills ``[anchor, mask, ..., mask]`` in parallel. It has no embedding
and no head of its own: both are the target's.

    features [b, n, m*d]  --fc, hidden_norm-->  context H [b, n, d]     (once, shared by all layers)
    block rows x [b, B, d] = embed([anchor, mask x (B-1)])
    per layer: Q from x; K and V from H and x by the same projections; k_norm and RoPE on both
    logits of drafts 1..B-1 = head(norm(x))[1..B-1]

``DFlashModule`` holds the weights and is what training optimises; ``DFlashDraft`` is what a pipeline calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from model_loaders.kv_cache import RowCache, Slots

FULL, SLIDING = "full_attention", "sliding_attention"

AttendTo = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, block keys, block values) -> the keys and values that block rows attend to, [b, h_kv, n, d]."""


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of one DFlash draft. Lengths are in tokens, widths in elements.

    ``rope`` is transformers' ``rope_parameters``: rope_type, rope_theta and the scaling's own keys.
    ``causal`` None: full layers see their whole block, sliding layers only what is behind them; True or False
    overrides both kinds. ``sliding_window`` counts the current token, as transformers counts it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    causal: bool | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    vocab_size: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    def is_causal(self, layer: int) -> bool:
        """Whether the block's rows of this layer may not look ahead inside their block."""
        if self.causal is not None:
            return self.causal
        return self.layer_types[layer] == SLIDING

    def window(self, layer: int) -> int | None:
        """The layer's window, the current token counted, or None for an unlimited one."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


class Attention(nn.Module):
    """Grouped-query attention with per-head query and key norms (Qwen3)."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        d, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.q_proj = nn.Linear(d, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, d, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Normed, rotated keys and plain values of rows x [b, w, d], each [b, h_kv, w, head_dim].

        The same projections serve context rows and block rows.
        """
        keys = _rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin)
        return keys, self._heads(self.v_proj(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Rows x [b, w, d] attend to keys and values [b, h_kv, n, head_dim] where mask [b, 1, w or 1, n]."""
        b, w, _ = x.shape
        queries = _rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)
        # The queries of one key head become rows of one matrix, so that the keys are never repeated.
        groups = queries.shape[1] // keys.shape[1]
        queries = queries.reshape(b, keys.shape[1], groups * w, self.head_dim)
        if mask.shape[2] != 1:
            mask = mask.repeat(1, 1, groups, 1)
        mask = mask.expand(-1, -1, groups * w, -1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.o_proj(out.reshape(b, -1, w, self.head_dim).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm layer. Only block rows pass ``input_layernorm``; the context has ``hidden_norm``."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)


class DFlashModule(nn.Module):
    """The draft's weights, under the names of z-lab's checkpoints, and its forward over one block."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.rope = _rotary(config)  # its buffers are not persistent: no tensor of a checkpoint

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DFlashModule:
        # Conversions (.to, .half, ...) move the rotary frequencies but leave them in float32, as transformers
        # has them in the target: rounded to bfloat16 they turn by visibly wrong angles.
        exact = dict(self.rope.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self.rope, name, buffer.to(getattr(self.rope, name).device))
        return self

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin of absolute positions [b, w], each [b, 1, w, head_dim] in dtype."""
        # The rotary module takes dtype and device from its first argument only.
        cos, sin = self.rope(torch.empty(0, dtype=dtype, device=positions.device), positions)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def context(self, features: Tensor) -> Tensor:
        """H [b, w, d] of the target's features [b, w, m*d] (layers in target_layer_ids' order)."""
        return self.hidden_norm(self.fc(features))

    def context_keys_values(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's context keys and values, [b, h_kv, w, head_dim], of features at positions [b, w]."""
        context = self.context(features)
        cos, sin = self.rotations(positions, context.dtype)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self._layers()]

    def forward(self, x: Tensor, positions: Tensor, attend_to: AttendTo, masks: list[Tensor]) -> Tensor:
        """Final normed hidden states [b, w, d] of block rows x [b, w, d] at absolute positions [b, w].

        attend_to adds a layer's context to the block's own keys and values; masks has one boolean mask a
        layer, [b, 1, w or 1, n], True where a row may look.
        """
        cos, sin = self.rotations(positions, x.dtype)
        for index, layer in enumerate(self._layers()):
            normed = layer.input_layernorm(x)
            keys, values = attend_to(index, *layer.self_attn.keys_values(normed, cos, sin))
            x = x + layer.self_attn(normed, cos, sin, keys, values, masks[index])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def _layers(self) -> list[Any]:
        return list(self.layers)


class DFlashDraft:
    """A loaded DFlash draft bound to its target: what a decoding round calls.

    A cache slot holds, for each layer, the keys and values of the committed tokens, each at its position. A
    block is written behind them, at ``start .. start + block_size - 1``, and is never cleaned up. Nothing
    stale can be seen: a row sees only positions below ``start + block_size``; those below ``start`` were
    written by ``extend`` after the block that used them, and the block itself overwrites the rest.

    name, revision: as loaded (revision: the hub's commit, or None). files: the weight files, for ``sha256``.
    """

    method = "dflash"
    # What exact capture needs of a method: a draft is its argmax, chosen without seeing the verification's
    # coins, so sampled requests are verified exactly with a one-hot proposal.
    mask_contract = True
    sampling_verify_available = True

    def __init__(
        self,
        module: DFlashModule,
        target: Any,
        *,
        name: str = "",
        revision: str | None = None,
        files: tuple[Path, ...] = (),
    ):
        self.module = module
        self.target = target
        self.config = module.config
        self.name = name
        self.revision = revision
        self.files = files

    @property
    def block_size(self) -> int:
        """Rows of a verified block: the anchor and block_size - 1 drafts."""
        return self.config.block_size

    @property
    def num_drafts(self) -> int:
        return self.config.block_size - 1

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The target's layers whose outputs, concatenated in this order, are the features (0: the first)."""
        return self.config.target_layer_ids

    @property
    def mask_token_id(self) -> int:
        return self.config.mask_token_id

    @property
    def device(self) -> torch.device:
        return self.module.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
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

    def new_cache(self, num_slots: int, max_length: int) -> RowCache:
        """An empty draft cache. max_length, in tokens, must leave room for a block behind the last token."""
        return RowCache(
            self.config.num_layers,
            self.config.num_key_value_heads,
            self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
            num_slots=num_slots,
            max_length=max_length,
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
        """Write the context keys and values of features [b, w, m*d] at positions int64 [b, w].

        slots, kv_length: as RowCache.begin takes them; without kv_length a CUDA device is waited for.

        Rows that don't belong to a sequence (padding, rejected drafts) are harmless while their positions lie
        at or past its next ``start``: later blocks and later calls overwrite them before anything reads them.
        """
        cache.begin(positions, slots, kv_length=kv_length)
        for layer, (keys, values) in enumerate(self.module.context_keys_values(features.to(self.dtype), positions)):
            cache.write(layer, keys, values)

    @torch.inference_mode()
    def propose(
        self,
        anchors: Tensor,
        starts: Tensor,
        cache: RowCache,
        slots: Slots = None,
        kv_length: int | None = None,
    ) -> Tensor:
        """Logits [b, block_size - 1, V] (the target's dtype) of the drafts that follow each row's anchor.

        anchors int64 [b]: the last committed token, which has no features yet. starts int64 [b]: its
        position, that is the number of context entries of the row; every one of them must have been written
        by ``extend``. kv_length: keys to look at, at least max(starts) + block_size; None reads it from
        starts, which waits for a CUDA device (inside a CUDA graph pass a fixed one and ``cache.reserve()``
        before).
        """
        block = self.block_size
        ids = anchors.new_full((anchors.shape[0], block), self.mask_token_id)
        ids[:, 0] = anchors
        positions = starts.unsqueeze(1) + torch.arange(block, device=starts.device)
        kv_length = cache.begin(positions, slots, kv_length=kv_length)
        masks = self.masks(starts, positions, kv_length)
        hidden = self.module(self.target.embed(ids).to(self.dtype), positions, cache.write, masks)
        return self.target.head(hidden[:, 1:])

    def masks(self, starts: Tensor, positions: Tensor, kv_length: int) -> list[Tensor]:
        """Each layer's boolean mask [b, 1, block_size or 1, kv_length]; key j of a slot is position j."""
        config, key = self.config, torch.arange(kv_length, device=starts.device)
        made: dict[tuple[bool, int | None], Tensor] = {}
        masks = []
        for layer in range(config.num_layers):
            kind = (config.is_causal(layer), config.window(layer))
            if kind not in made:
                made[kind] = visible(positions, key, starts.unsqueeze(1), self.block_size, *kind).unsqueeze(1)
            masks.append(made[kind])
        return masks


def visible(
    positions: Tensor, key: Tensor, starts: Tensor, block_size: int, causal: bool, window: int | None
) -> Tensor:
    """Boolean [b, w or 1, n]: may the block row at positions [b, w] see the key at position key [n]?

    A block starts at starts [b, 1]; everything before it is context. window counts the current token, so a
    row sees distances below it, on both sides where the layer is not causal.
    """
    seen = (key < starts + block_size).unsqueeze(1)
    if causal:
        seen = seen & (key <= positions.unsqueeze(-1))
    if window is not None:
        seen = seen & ((positions.unsqueeze(-1) - key).abs() < window)
    return seen


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [b, h, w, head_dim] in the half-split layout; the whole head is rotated."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _rotary(config: DFlashConfig) -> Qwen3RotaryEmbedding:
    """transformers' rotary embedding, which knows yarn, llama3 and linear scaling."""
    return Qwen3RotaryEmbedding(
        Qwen3Config(
            vocab_size=1,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope),
        )
    )
