"""The attention that targets run with while a draft is trained: fused CUDA kernels for both of its uses.

torch's fused kernels take grouped heads or a mask, not both. Whole texts need neither mask nor cache: causal
attention with grouped heads. Writing needs the mask: there the queries of one key head become rows, so the
keys aren't repeated. Neither asks the device anything, so both can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# No mask function goes with the name, so transformers makes no mask of its own.
_NAME = "specmask_training_sdpa"


@contextmanager
def training_attention(target: Any) -> Iterator[None]:
    """The target's attention is this file's inside the block."""
    before = target.model.config._attn_implementation
    target.model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        target.model.set_attn_implementation(before)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [b, heads, w, d], key and value [b, kv_heads, n, d], mask None (causal) or bool [b, 1, w, n]."""
    b, heads, width, d = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups != 1)
        return out.transpose(1, 2), None
    folded = query.reshape(b, key.shape[1], groups * width, d)
    mask = attention_mask.repeat(1, 1, 1 if width == 1 else groups, 1).expand(-1, -1, groups * width, -1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(b, heads, width, -1).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
