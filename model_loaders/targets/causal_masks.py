"""Which entries of its slot each token of a block attends to."""

from __future__ import annotations

import torch

from model_loaders.layers.attention import additive_mask, prepared_mask


class CausalMasks:
    """The masks of one model's forwards, made as its attention takes them.

    Attributes:
        packs_heads: Whether attention packs a group's heads into rows, as on a GPU.
    """

    def __init__(self, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device):
        """heads: of the queries, 0 where the config doesn't say. dtype: the queries'."""
        self.packs_heads = device.type == "cuda"
        self._heads, self._kv_heads, self._dtype, self._device = heads, kv_heads, dtype, device
        self._key_index = torch.arange(0, device=device)

    def of(self, positions: torch.Tensor, kv_length: int) -> torch.Tensor:
        """Of tokens at positions [b, w] over kv_length entries: [b, 1, w, kv_length], or `prepared_mask`'s shape."""
        visible = self._keys(kv_length) <= positions[:, None, :, None]
        if self.packs_heads:
            return prepared_mask(visible, self._heads, self._kv_heads, self._dtype)
        return additive_mask(visible, self._dtype)

    def _keys(self, kv_length: int) -> torch.Tensor:
        if self._device.type == "cuda":  # a kept index could move under a captured graph
            return torch.arange(kv_length, device=self._device)
        if self._key_index.shape[0] < kv_length:
            self._key_index = torch.arange(2 * kv_length, device=self._device)
        return self._key_index[:kv_length]
