"""The slow, obvious oracle of the DFlash draft: one sequence, no cache, one query row and one head at a time.

Written from the paper's description (arXiv 2602.06036, section 3) on plain tensors; it shares no code with
model_loaders, so that a mistake there can't hide here.
"""

from __future__ import annotations

import math

import torch

from tests.naive_drafts import convolve


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, position: int, inverse_frequencies: list[float], scale: float = 1.0) -> torch.Tensor:
    """RoPE of one head's vector [head_dim]: pair (i, i + half) turns by position * inverse_frequencies[i]."""
    half = x.shape[0] // 2
    out = x.clone()
    for i in range(half):
        angle = position * inverse_frequencies[i]
        c, s = scale * math.cos(angle), scale * math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def plain_frequencies(head_dim: int, theta: float) -> list[float]:
    """RoPE's unscaled inverse frequencies, head_dim / 2 of them."""
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def around(w: dict[str, torch.Tensor], part: str, normed: torch.Tensor):
    """DFlash 2's convolutions of one sublayer: its input [B, d] convolved, and what convolves its output."""
    base = w.get(f"{part}.base_kernel")
    if base is None:
        return normed, lambda out: out
    deltas = (normed @ w[f"{part}.kernel_projection.weight"].T).reshape(len(normed), 2, base.shape[1], -1)
    group = base.shape[2] // deltas.shape[3]
    return convolve(normed, base[0], deltas[:, 0], group), lambda out: convolve(out, base[1], deltas[:, 1], group)


def block_hidden(
    weights: dict[str, torch.Tensor],
    features: torch.Tensor,
    block: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    inverse_frequencies: list[float],
    eps: float = 1e-6,
    rope_scale: float = 1.0,
    layer_kinds: list[tuple[bool, int | None]],
) -> torch.Tensor:
    """Final normed hidden states [B, d] of one block.

    features [start, m*d]: the target's features of positions 0..start-1. block [B, d]: embedded block rows at
    positions start..start+B-1. layer_kinds: (causal, window or None) of every layer.
    """
    start, x = features.shape[0], block.clone()
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    for layer, (causal, window) in enumerate(layer_kinds):
        w = {k.removeprefix(f"layers.{layer}."): v for k, v in weights.items() if k.startswith(f"layers.{layer}.")}

        def linear(rows: torch.Tensor, name: str, w: dict[str, torch.Tensor] = w) -> torch.Tensor:
            out = rows @ w[f"self_attn.{name}_proj.weight"].T
            bias = w.get(f"self_attn.{name}_proj.bias")
            return out if bias is None else out + bias

        normed = rms(x, w["input_layernorm.weight"], eps)
        normed, leave = around(w, "attention_conv", normed)
        rows = torch.cat([context, normed])
        all_keys, all_values = linear(rows, "k"), linear(rows, "v")
        out = torch.zeros(x.shape[0], num_heads * head_dim, dtype=x.dtype)
        for head in range(num_heads):
            kv = head // (num_heads // num_kv_heads)
            piece = slice(kv * head_dim, (kv + 1) * head_dim)
            keys = torch.stack(
                [
                    rotate(rms(k, w["self_attn.k_norm.weight"], eps), j, inverse_frequencies, rope_scale)
                    for j, k in enumerate(all_keys[:, piece])
                ]
            )
            for r in range(x.shape[0]):
                position = start + r
                query = linear(normed[r : r + 1], "q")[0, head * head_dim : (head + 1) * head_dim]
                query = rotate(rms(query, w["self_attn.q_norm.weight"], eps), position, inverse_frequencies, rope_scale)
                scores = keys @ query / math.sqrt(head_dim)
                for j in range(keys.shape[0]):
                    ahead = causal and j > position
                    outside = window is not None and abs(position - j) >= window
                    if ahead or outside:
                        scores[j] = -math.inf
                out[r, head * head_dim : (head + 1) * head_dim] = torch.softmax(scores, 0) @ all_values[:, piece]
        x = x + leave(linear(out, "o"))
        normed = rms(x, w["post_attention_layernorm.weight"], eps)
        normed, leave = around(w, "mlp_conv", normed)
        gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
        x = x + leave((gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T)
    return rms(x, weights["norm.weight"], eps)
