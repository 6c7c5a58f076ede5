"""Decoder layers with half the operators: a GPU's round of a small model is mostly launches, and a CPU's has many.

A pre-norm layer of the Llama family (Llama, Mistral, Qwen2, Qwen3 and relatives) takes 29 kernels as transformers
computes it. Here projections of one input are one product, queries and keys are turned together, by factors made once
for all layers, keys and values are stored together, and the residual is added by the product itself: 12, and 9 with
`Operators`. Weights, names and results stay; only the last bits of a half-precision sum may differ, rounded once where
transformers rounds twice. On a CPU, with `PackedLinear`s, all bits are the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_loaders.kv_cache import RowCache
from model_loaders.layers.attention import grouped_sdpa
from model_loaders.layers.joint_linear import JointLinear, add_product
from model_loaders.layers.operators import Operators
from model_loaders.layers.packed_linear import PackedLinear

_PROBED_ROWS, _PROBED_WIDTH = 2, 5


class Shared:
    """What the layers of a model have in common: their operators, and what queries and keys are rotated by.

    operators: None: torch's.
    """

    operators: Operators | None = None
    _angles: tuple[Tensor, Tensor] | None = None
    _turns: Tensor

    def __init__(self, turned: int, kept: int):
        """turned: heads of queries and keys; kept: of values."""
        self.turned, self.kept = turned, kept

    def turns(self, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Of cosines and sines [b, w, d]: [b, heads, w, 2, 2, d / 2], 1 and 0 for values; made once a forward.

        At [..., s, t, :] is the factor of input half t in output half s. What is turned lies in memory as these do,
        head by head: attention that packs heads takes it so.
        """
        if self._angles is None or self._angles[0] is not angles[0]:
            (first_cos, second_cos), (first_sin, second_sin) = (x.unsqueeze(1).chunk(2, -1) for x in angles)
            turns = torch.stack((first_cos, -first_sin, second_sin, second_cos), -2)
            one, zero = torch.ones_like(first_cos), torch.zeros_like(first_cos)
            kept = torch.stack((one, zero, zero, one), -2)
            parts = turns.expand(-1, self.turned, -1, -1, -1), kept.expand(-1, self.kept, -1, -1, -1)
            self._angles, self._turns = angles, torch.cat(parts, 1).unflatten(-2, (2, 2))
        return self._turns

    def forget(self) -> None:
        """Let go of a forward's."""
        self._angles = None
        del self._turns


class LeanLayer:
    """The forward of one decoder layer over a `RowCache`; anything else goes to the layer's own.

    The rows that it is given are overwritten.
    """

    def __init__(self, layer: Any, shared: Shared, last: bool):
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.shared, self.last = layer, shared, last
        self.head_dim: int = attention.head_dim
        self.queries = attention.q_proj.out_features // self.head_dim
        self.keys = attention.k_proj.out_features // self.head_dim
        self.projections: JointLinear | None = JointLinear.of((attention.q_proj, attention.k_proj, attention.v_proj))
        self.gates: JointLinear | None = JointLinear.of((mlp.gate_proj, mlp.up_proj))
        self._has_silu = _is_silu(mlp.act_fn)

    def own(self, *arguments: Any, **named: Any) -> Any:
        """The layer as transformers computes it."""
        return type(self.layer).forward(self.layer, *arguments, **named)

    def __call__(self, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        cache = named.get("past_key_values", named.get("cache"))
        projections, gates, angles = self.projections, self.gates, named.get("position_embeddings")
        if (
            torch.compiler.is_compiling()
            or not isinstance(cache, RowCache)
            or more
            or angles is None
            or projections is None  # of a copy
            or gates is None
            or not (projections.usable and gates.usable)
        ):
            return self.own(hidden_states, *more, **named)
        layer = self.layer
        rows = self._attend(projections(layer.input_layernorm(hidden_states)), angles, named["attention_mask"], cache)
        hidden_states = add_product(hidden_states, layer.self_attn.o_proj, rows)
        rows, operators = gates(layer.post_attention_layernorm(hidden_states)), self.shared.operators
        if operators is not None and self._has_silu:
            rows = operators.gated(rows)
        else:
            gate, up = rows.chunk(2, -1)
            rows = layer.mlp.act_fn(gate) * up
        return add_product(hidden_states, layer.mlp.down_proj, rows)

    def _attend(self, projected: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: RowCache) -> Tensor:
        """What o_proj takes, [b, w, heads * head_dim]."""
        attention = self.layer.self_attn
        heads = projected.unflatten(-1, (-1, self.head_dim))
        if hasattr(attention, "q_norm"):
            queries, keys, values = heads.split([self.queries, self.keys, self.keys], 2)
            heads = torch.cat((attention.q_norm(queries), attention.k_norm(keys), values), 2)
        operators = self.shared.operators
        if operators is not None and angles[0].dtype == heads.dtype and angles[0].shape[:2] == heads.shape[:2]:
            # Where heads aren't packed into rows, attention's output lies as its queries do, and o_proj takes rows.
            by_rows = mask is None or mask.shape[2] == heads.shape[1]
            queries = operators.turned(heads, angles, *cache.places(attention.layer_idx), by_rows)
            keys, values = cache.held(attention.layer_idx)
        else:
            first, second = (self.shared.turns(angles) * heads.transpose(1, 2).unflatten(-1, (1, 2, -1))).unbind(-2)
            if self.last:
                self.shared.forget()
            queries, entries = (first + second).flatten(-2).split([self.queries, 2 * self.keys], 1)
            keys, values = cache.write_both(attention.layer_idx, entries)
        attended, _ = grouped_sdpa(attention, queries, keys, values, mask, scaling=attention.scaling)
        return attended.flatten(2)


def lean_layers(model: Any, layers: Sequence[nn.Module]) -> Shared | None:
    """Gives a model's decoder layers the forward of a `LeanLayer`, if that is what all of them compute.

    They are recognised by what they compute: random rows come out the same, and so do the keys and values that they
    store. Parameters keep names and identity; those of one product lie in one tensor. Returns what they share, or None
    if they keep the forward that they had.
    """
    if not all(_looks_lean(layer) for layer in layers):
        return None
    attention: Any = layers[0].self_attn
    queries, keys = (x.out_features // attention.head_dim for x in (attention.q_proj, attention.k_proj))
    shared = Shared(queries + keys, keys)
    lean = [LeanLayer(layer, shared, last=layer is layers[-1]) for layer in layers]
    if not _compute_the_same(model, lean):
        return None
    for one in lean:
        one.layer.forward = one
    return shared


@torch.inference_mode()
def _is_silu(activation: Any) -> bool:
    """Whether that is what it computes: random rows come out the same."""
    rows = 3 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    return bool(torch.allclose(activation(rows), nn.functional.silu(rows), rtol=1e-6, atol=1e-7))


def _looks_lean(layer: Any) -> bool:
    """Whether a layer has the parts of one, and no other parameters."""
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    projections: list[Any] = [getattr(attention, f"{name}_proj", None) for name in "qkv"]
    gates: list[Any] = [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up")]
    linears = [*projections, *gates, getattr(attention, "o_proj", None), getattr(mlp, "down_proj", None)]
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    of_heads = [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]
    parts = [*linears, *norms, *of_heads]
    if {type(linear) for linear in linears} not in ({nn.Linear}, {PackedLinear}) or len(of_heads) == 1:
        return False
    return (
        all(isinstance(part, nn.Module) for part in parts)
        and sum(1 for part in parts for _ in part.parameters()) == sum(1 for _ in layer.parameters())
        and all(len({part.bias is None for part in joined}) == 1 for joined in (projections, gates))
        and projections[1].out_features == projections[2].out_features
        and all(isinstance(getattr(attention, name, None), int) for name in ("head_dim", "layer_idx"))
        and hasattr(attention, "scaling")
        and hasattr(mlp, "act_fn")
    )


@torch.inference_mode()
def _compute_the_same(model: Any, lean: Sequence[LeanLayer]) -> bool:
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    weight = lean[0].layer.self_attn.q_proj.weight
    if rotary is None:
        return False
    generator = torch.Generator().manual_seed(0)
    size = (_PROBED_ROWS, _PROBED_WIDTH, weight.shape[1])
    # Small rows: beside large ones what attention and MLP add would be lost.
    rows = (0.01 * torch.randn(size, generator=generator)).to(weight.device, weight.dtype)
    positions = torch.arange(_PROBED_ROWS * _PROBED_WIDTH, device=weight.device).view(_PROBED_ROWS, -1)
    cache = RowCache(
        len(lean), lean[0].keys, lean[0].head_dim, num_slots=_PROBED_ROWS, max_length=positions.numel(),
        dtype=weight.dtype, device=weight.device,
    )  # fmt: skip
    cache.begin(positions, kv_length=positions.numel())
    angles = rotary(rows, positions)
    visible = torch.arange(positions.numel(), device=weight.device) <= positions[:, None, :, None]
    if not isinstance(angles, tuple) or angles[0].shape[-1] != lean[0].head_dim:
        return False
    for one in lean:
        names = inspect.signature(type(one.layer).forward).parameters
        named = {"attention_mask": visible, "position_ids": positions, "position_embeddings": angles}
        named["cache" if "cache" in names else "past_key_values"] = cache
        want = one.own(rows.clone(), **named)
        stored = cache.snapshot(_PROBED_ROWS - 1, positions.numel())
        got = one(rows.clone(), **named)
        again = cache.snapshot(_PROBED_ROWS - 1, positions.numel())
        for joint in (one.projections, one.gates):
            assert joint is not None
            joint.release_parts()
        index = one.layer.self_attn.layer_idx
        if not (
            isinstance(want, Tensor)
            and _close(got - rows, want - rows)
            and _close(again.keys[index], stored.keys[index])
            and _close(again.values[index], stored.values[index])
        ):
            return False
    return True


def _close(got: Tensor, want: Tensor) -> bool:
    """Whether all that lies between is roundings."""
    error, size = (got.float() - want.float()).norm(), want.float().norm()
    return bool(error <= 4 * torch.finfo(want.dtype).eps * size)
