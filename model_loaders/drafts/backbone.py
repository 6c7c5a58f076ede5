"""The backbone of the DFlash family: a few Qwen3-style layers that fill a block of masks in one forward.

Source: DFlash, arXiv 2602.06036, section 3. A draft sees the target's hidden states ("features") of the
committed tokens as keys and values, and fills ``[anchor, mask, ..., mask]`` in parallel.

    features [b, n, m*d]  --fc, hidden_norm-->  context H [b, n, d]     (once, shared by all layers)
    block rows x [b, B, d] = embed([anchor, mask x (B-1)])
    per layer: Q from x; K and V from H and x by the same projections; k_norm and RoPE on both
    hidden states [b, B, d] = norm(x)

The embedding and the head are the target's, unless the checkpoint brings its own. ``Backbone`` holds the weights
and is what training optimises; the methods (dflash.py, dspark.py, dflash2.py) add what turns hidden states into
proposals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

FULL, SLIDING = "full_attention", "sliding_attention"

AttendTo = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, block keys, block values) -> the keys and values that block rows attend to, [b, h_kv, n, d]."""

AttendToOwn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same for one layer."""


@dataclass(frozen=True)
class DraftConfig:
    """The shape of one draft of the family. Lengths are in tokens, widths in elements.

    ``rope`` is transformers' ``rope_parameters``: rope_type, rope_theta and the scaling's own keys.
    ``causal`` None: full layers see their whole block, sliding layers only what is behind them; True or False
    overrides both kinds. ``sliding_window`` counts the current token, as transformers counts it.

    block_size: rows of a block. sample_from_anchor: row k proposes the token behind its own position, so a block
    proposes block_size tokens; otherwise row k fills its own position and the anchor's row proposes nothing.
    own_embeddings, own_head: the checkpoint brings them (vocab_size is needed then). draft_vocab_size: tokens that
    the draft can propose, where they are fewer than the target's. Logits are multiplied by output_multiplier, then
    soft-capped (``cap * tanh(logits / cap)``); embeddings are multiplied by embedding_scale.
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
    sample_from_anchor: bool = False
    own_embeddings: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

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

    def __init__(self, config: DraftConfig):
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

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm layer. Only block rows pass ``input_layernorm``; the context has ``hidden_norm``."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend_to: AttendToOwn, mask: Tensor) -> Tensor:
        """Rows x [b, w, d] through attention and MLP; attend_to and mask are the layer's own."""
        normed = self.input_layernorm(x)
        x = x + self.attend(normed, cos, sin, attend_to, mask)
        return x + self.mlp(self.post_attention_layernorm(x))

    def attend(self, normed: Tensor, cos: Tensor, sin: Tensor, attend_to: AttendToOwn, mask: Tensor) -> Tensor:
        """The attention of normed rows [b, w, d]."""
        keys, values = attend_to(*self.self_attn.keys_values(normed, cos, sin))
        return self.self_attn(normed, cos, sin, keys, values, mask)


class Backbone(nn.Module):
    """The draft's weights, under the names of z-lab's checkpoints, and its forward over one block.

    embed_tokens [vocab_size, d], lm_head [draft_vocab_size or vocab_size, d]: the draft's own, or None. d2t int64
    [draft_vocab_size]: the target's token of the draft's token i is i + d2t[i]; None where they are the same.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        d, vocab_size = config.hidden_size, config.vocab_size or 0
        proposed = config.draft_vocab_size or vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, d) if config.own_embeddings else None
        self.lm_head = nn.Linear(d, proposed, bias=False) if config.own_head else None
        self.d2t: Tensor | None
        self.register_buffer("d2t", torch.zeros(proposed, dtype=torch.int64) if config.draft_vocab_size else None)
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(self.new_layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.rope = _rotary(config)  # its buffers are not persistent: no tensor of a checkpoint

    @staticmethod
    def new_layer(config: DraftConfig) -> Layer:
        """A layer; a method with layers of its own overrides it."""
        return Layer(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Backbone:
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
            x = layer(x, cos, sin, partial(attend_to, index), masks[index])
        return self.norm(x)

    def _layers(self) -> list[Any]:
        return list(self.layers)


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


def _rotary(config: DraftConfig) -> Qwen3RotaryEmbedding:
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
