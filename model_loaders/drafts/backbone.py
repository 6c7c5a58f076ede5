"""The backbone of the DFlash family: a few Qwen3-style layers that fill a block of masks in one forward.

Source: DFlash, arXiv 2602.06036, section 3. A draft sees the target's hidden states ("features") of the
committed tokens as keys and values, and fills ``[anchor, mask, ..., mask]`` in parallel.

    features [b, n, m*d]  --fc, hidden_norm-->  context H [b, n, d]     (once, shared by all layers)
    block rows x [b, B, d] = embed([anchor, mask x (B-1)])
    per layer: Q from x; K and V from H and x by the same projections; k_norm and RoPE on both
    hidden states [b, B, d] = norm(x)

In decoding a GPU spends its time on launches, so the forward has few operators: projections of one input are one
product (``Backbone.join``), and queries and keys are normed and turned together, by factors made once for all layers.

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

from model_loaders.layers.attention import additive_mask, packed_sdpa
from model_loaders.layers.joint_linear import JointLinear, add_product
from model_loaders.layers.operators import Operators

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

    def mask_of(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """A layer's mask as ``Backbone.forward`` takes it, of boolean [b, w, n]: True where a row may look."""
        return additive_mask(visible.unsqueeze(1), dtype, self.num_attention_heads // self.num_key_value_heads)

    def window(self, layer: int) -> int | None:
        """The layer's window, the current token counted, or None for an unlimited one."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


class Attention(nn.Module):
    """Grouped-query attention with per-head query and key norms (Qwen3)."""

    joint: JointLinear | None = None  # of q_proj, k_proj and v_proj

    def __init__(self, config: DraftConfig):
        super().__init__()
        d, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = head_dim, config.rms_norm_eps
        self.q_proj = nn.Linear(d, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, d, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Of queries, keys and values."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(self, x: Tensor, turns: Tensor, attend_to: AttendToOwn, mask: Tensor) -> Tensor:
        """What o_proj takes, [b, w, heads * head_dim], of normed rows x [b, w, d]; the rest as ``Layer.forward``."""
        if self.joint is not None and self.joint.usable:
            projected = self.joint(x)
        else:
            projected = torch.cat([projection(x) for projection in self.projections], -1)
        heads = projected.unflatten(-1, (-1, self.head_dim))
        turned = turned_heads(heads, self.num_heads + self.num_kv_heads, turns, self.eps)
        queries, keys = turned.split([self.num_heads, self.num_kv_heads], 1)
        keys, values = attend_to(keys, heads[:, :, -self.num_kv_heads :].transpose(1, 2))
        return packed_sdpa(queries, keys, values, mask).flatten(2)


class MLP(nn.Module):
    """SwiGLU."""

    joint: JointLinear | None = None  # of gate_proj and up_proj
    operators: Operators | None = None  # None: torch's

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What down_proj takes, [b, w, intermediate], of normed rows x [b, w, d]."""
        if self.joint is not None and self.joint.usable:
            rows = self.joint(x)
            if self.operators is not None:
                return self.operators.gated(rows)
            gate, up = rows.chunk(2, -1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return F.silu(gate) * up


class Layer(nn.Module):
    """One pre-norm layer. Only block rows pass ``input_layernorm``; the context has ``hidden_norm``."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, turns: Tensor, attend_to: AttendToOwn, mask: Tensor) -> Tensor:
        """Rows x [b, w, d] through attention and MLP; without gradients x is overwritten.

        turns: the layer's of ``Backbone.turns``, [b, heads + kv_heads, w, ...]. attend_to: the layer's own. mask: see
        ``Backbone.forward``.
        """
        rows = self.self_attn(self.input_layernorm(x), turns, attend_to, mask)
        x = add_product(x, self.self_attn.o_proj, rows)
        return add_product(x, self.mlp.down_proj, self.mlp(self.post_attention_layernorm(x)))


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
        self._joint: JointLinear | None = None  # every layer's projections; see `join`
        self.rope = _rotary(config)  # its buffers are not persistent: no tensor of a checkpoint

    @staticmethod
    def new_layer(config: DraftConfig) -> Layer:
        """A layer; a method with layers of its own overrides it."""
        return Layer(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Backbone:
        # Conversions (.to, .half, ...) move the rotary frequencies but leave them in float32, as transformers
        # has them in the target: rounded to bfloat16 they turn by visibly wrong angles.
        exact, joined = dict(self.rope.named_buffers()), self._joint is not None
        if joined:  # what is joined would be held beside what comes of it
            self._joint = None
            for layer in self._layers():
                layer.self_attn.joint = layer.mlp.joint = None
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self.rope, name, buffer.to(getattr(self.rope, name).device))
        if joined:
            self.join()
        return self

    def join(self) -> None:
        """For decoding: one product for projections of one input, and one for all layers' context keys and values.

        Parameters stay as they are, but become views of what is multiplied with. Nothing changes where gradients are
        recorded, in ``functional_call`` with other parameters, or for linear layers of another kind, as those of
        packed_linear.py, which multiply with copies of their own.
        """
        layers = self._layers()
        parts = [part for layer in layers for part in layer.self_attn.projections]
        if all(type(part) is nn.Linear for part in parts):
            self._joint = JointLinear.of(parts)
            for index, layer in enumerate(layers):
                layer.self_attn.joint = self._joint[3 * index : 3 * index + 3]
        for layer in layers:
            if type(layer.mlp.gate_proj) is type(layer.mlp.up_proj) is nn.Linear:
                layer.mlp.joint = JointLinear.of((layer.mlp.gate_proj, layer.mlp.up_proj))

    def use_operators(self, operators: Operators | None) -> None:
        """Decodes with these, on CUDA, where projections are joined; None: with torch's. The last bits may differ."""
        for layer in self._layers():
            layer.mlp.operators = operators

    def turns(self, weights: Tensor, positions: Tensor) -> Tensor:
        """Norm and RoPE in one: what ``turned_heads`` needs at absolute positions [b, w].

        weights [layers, h, head_dim]: of each head's norm, or h = 1 for one of all heads. Returns
        [layers, b, h, w, 2, 2, head_dim / 2], in weights' dtype: the factor of input half t in output half s at
        [..., s, t, :].
        """
        angles = positions.unsqueeze(-1) * self.rope.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.rope.attention_scaling != 1:
            cos, sin = cos * self.rope.attention_scaling, sin * self.rope.attention_scaling
        rotation = torch.stack((cos, -sin, sin, cos), -2).to(weights.dtype).unflatten(-2, (2, 2))
        return weights.unflatten(-1, (2, -1))[:, None, :, None, None] * rotation.unsqueeze(1)

    def context(self, features: Tensor) -> Tensor:
        """H [b, w, d] of the target's features [b, w, m*d] (layers in target_layer_ids' order)."""
        return self.hidden_norm(self.fc(features))

    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """All layers' context keys and values of features at positions [b, w], [layers, b, h_kv, w, head_dim] each."""
        context, config = self.context(features), self.config
        keys, values = self._context_heads(context)
        weights = torch.stack([layer.self_attn.k_norm.weight for layer in self._layers()]).unsqueeze(1)
        turns = self.turns(weights, positions)
        return turned_heads(keys, config.num_key_value_heads, turns, config.rms_norm_eps), values.transpose(2, 3)

    def _context_heads(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """All layers' keys of context rows [b, w, d], as projected, and values: [layers, b, w, h_kv, head_dim] each.

        Behind the heads of the keys there may be others.
        """
        layers, joint, heads = self._layers(), self._joint, self.config.num_key_value_heads
        if joint is None or not joint.usable:
            projections = zip(*(layer.self_attn.projections[1:] for layer in layers), strict=True)
            keys, values = (torch.stack([projection(context) for projection in kind]) for kind in projections)
            return keys.unflatten(-1, (heads, -1)), values.unflatten(-1, (heads, -1))
        own = slice(self.config.num_attention_heads * self.config.head_dim, None)
        weights = joint.weight.unflatten(0, (len(layers), -1))[:, own].transpose(1, 2)
        rows = context.flatten(0, 1).expand(len(layers), -1, -1)
        if joint.bias is None:
            projected = torch.bmm(rows, weights)
        else:
            projected = torch.baddbmm(joint.bias.unflatten(0, (len(layers), 1, -1))[..., own], rows, weights)
        both = projected.unflatten(1, context.shape[:2]).unflatten(-1, (2 * heads, -1))
        return both, both[..., heads:, :]

    def forward(self, x: Tensor, positions: Tensor, attend_to: AttendTo, masks: list[Tensor]) -> Tensor:
        """Final normed hidden states [b, w, d] of block rows x [b, w, d] at absolute positions [b, w].

        attend_to adds a layer's context to the block's own keys and values; masks has one a layer, from
        ``DraftConfig.mask_of``: [b, 1, heads / kv_heads * w, n], 0 where a row may look and -inf elsewhere. Where no
        gradients are recorded x is overwritten.
        """
        turns = self._block_turns(positions)
        for index, layer in enumerate(self._layers()):
            x = layer(x, turns[index], partial(attend_to, index), masks[index])
        return self.norm(x)

    def _block_turns(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Each layer's turns of its query heads and, behind them, its key heads."""
        config, norms = self.config, []
        for layer in self._layers():
            norms += config.num_attention_heads * [layer.self_attn.q_norm.weight]
            norms += config.num_key_value_heads * [layer.self_attn.k_norm.weight]
        return self.turns(torch.stack(norms).unflatten(0, (config.num_layers, -1)), positions).unbind(0)

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


def turned_heads(x: Tensor, count: int, turns: Tensor, eps: float) -> Tensor:
    """The first `count` heads of x [..., w, h, head_dim], normed and rotated: [..., count, w, head_dim].

    turns [..., count or 1, w, 2, 2, head_dim / 2] from ``Backbone.turns``: RoPE in the half-split layout. The result
    lies in memory as turns of `count` heads do, so that heads of a group are rows of one matrix without a copy.
    """
    # All heads are normed, values too: on a GPU a part of x would have to be copied first.
    normed = F.rms_norm(x, x.shape[-1:], eps=eps)[..., :count, :].transpose(-3, -2)
    first, second = (turns * normed.unflatten(-1, (1, 2, -1))).unbind(-2)
    return (first + second).flatten(-2)


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
