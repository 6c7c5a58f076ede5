"""The attention that targets run with: torch's SDPA on grouped heads, without copying keys and values.

transformers' own "sdpa" repeats keys and values for every query head whenever a mask is given, which
for a ragged batch is every step. This one is registered beside it under the name ATTENTION.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_loaders.errors import CheckpointError
from model_loaders.layers.compact import compact_rows, running_compact

ATTENTION = "specmask_sdpa"

# With fewer query rows than this the CPU kernel's matrix products take other paths, whose last bits depend on
# the batch. Above, a row's result depends neither on its batch nor on its block's width.
_FEWEST_ROWS = 4

# Up to this many query rows a GPU is fastest with a group's heads packed into rows: on an H200, 32 rows of 8
# queries over 1,024 keys took 77 us instead of 195 (32 heads, 8 of keys, bfloat16; 783 with repeated keys).
# One query row and prompts are faster as they are.
_MOST_PACKED = 64

# But no more heads than this, of all slots together, are attended to side by side anyway, a multiprocessor each, and
# what comes of them lies as it is needed: packed rows must be put in order, 2.4 us a layer.
_FEWEST_HEADS = 128

# In elements: the fused kernels read masks whose rows begin at multiples of it.
_ALIGNED = 16

# What some architectures ask of their attention that plain SDPA over the whole cache would ignore.
_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "softcap": "attention logit soft-capping",
    "sliding_window": "a sliding window",
    "position_bias": "a position bias",
}


def additive_mask(visible: torch.Tensor, dtype: torch.dtype, groups: int = 1) -> torch.Tensor:
    """Boolean [b, 1, w, n] as a mask of `groups` packed heads, [b, 1, groups * w, n]: 0 where visible, -inf elsewhere.

    In every layer SDPA would turn a boolean mask into this one, and copy one whose rows aren't aligned.
    """
    batch, _, width, length = visible.shape
    shape = (batch, 1, groups, width, -(-length // _ALIGNED) * _ALIGNED)
    mask = torch.full(shape, -torch.inf, dtype=dtype, device=visible.device)[..., :length]
    return mask.masked_fill_(visible[:, :, None], 0.0).flatten(2, 3)


def prepared_mask(mask: torch.Tensor, heads: int, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """A forward's boolean mask [b, 1, w, n] as its attentions take it, made once instead of in every layer.

    Additive, in the queries' dtype; where a GPU packs heads into rows its rows are too: [b, 1, heads/kv_heads * w, n].
    """
    packs = heads and heads % kv_heads == 0 and packs_heads(mask.shape[0], mask.shape[2], heads, kv_heads)
    return additive_mask(mask, dtype, heads // kv_heads if packs else 1)


def packs_heads(batch: int, width: int, heads: int, kv_heads: int) -> bool:
    """Whether a GPU packs a group's heads into rows, for blocks of so many slots and rows."""
    return heads != kv_heads and 1 < width <= _MOST_PACKED and batch * heads > _FEWEST_HEADS


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' calling convention.

    query [b, heads, w, d], key [b, kv_heads, n, d], value [b, kv_heads, n, dv]; attention_mask boolean
    (True: attend) or additive, broadcastable to [b, heads, w, n], or as `prepared_mask` gives it, or None: causal
    when w > 1.
    Returns ([b, w, heads, dv], None). Under ``compact_rows``, query [1, heads, n, d] -> [1, n, heads, dv].

    Raises CheckpointError for sinks, soft-capping, windows and position biases.
    """
    # What is compiled runs whole blocks, and the compiler can't read context variables.
    compact = None if torch.compiler.is_compiling() else running_compact()
    if compact is not None:
        query = compact.spread(query.transpose(1, 2), 0.0).transpose(1, 2)
        with compact_rows(None):
            output, _ = grouped_sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
        return compact.take(output), None
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise CheckpointError(
                f"{type(module).__name__}: {name} is set, expected None: the per-row cache's attention can't "
                f"represent {meaning}; use a full-attention target"
            )
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_causal = bool(is_causal) and query.shape[2] > 1
    else:
        is_causal = False
        if attention_mask.dtype not in (torch.bool, query.dtype):  # an architecture that attends in another precision
            attention_mask = attention_mask.to(query.dtype)
    width, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    masked = attention_mask is not None and attention_mask.shape[1] == 1
    if query.device.type == "cuda" and masked and packs_heads(len(query), width, heads, kv_heads):
        assert attention_mask is not None
        return packed_sdpa(query, key, value, attention_mask, dropout, scaling), None
    if width < _FEWEST_ROWS and attention_mask is not None and query.device.type == "cpu":
        query, attention_mask = _widen(query), _widen(attention_mask)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=heads != kv_heads,
    )
    return output[:, :, :width].transpose(1, 2), None


def packed_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> torch.Tensor:
    """Grouped attention as ordinary attention on kv_heads heads with heads/kv_heads * w query rows each.

    query [b, heads, w, d], key and value [b, kv_heads, n, .], mask [b, 1, w, n], or its rows already packed
    [b, 1, heads/kv_heads * w, n] -> [b, w, heads, dv], contiguous.
    """
    batch, heads, width, _ = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    rows = query.reshape(batch, kv_heads, groups * width, -1)
    if groups != 1 and mask.shape[2] == width:
        mask = mask.repeat(1, 1, groups, 1)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    # Permuted before heads are put together, so that there is one copy.
    return output.unflatten(2, (groups, width)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()


def _widen(rows: torch.Tensor) -> torch.Tensor:
    """[b, heads, w, n] -> [b, heads, _FEWEST_ROWS, n], the last row repeated.

    Copied, not expanded: over rows of stride 0 the products take another path again.
    """
    missing = _FEWEST_ROWS - rows.shape[2]
    return torch.cat((rows, rows[:, :, -1:].expand(-1, -1, missing, -1)), dim=2)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_sdpa)
# Masks for calls without one of their own (training, probes): as for "sdpa".
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
