"""One layer of a `RowCache`, as transformers' models see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from model_loaders.kv_cache.row_cache import RowCache


class RowLayer(CacheLayerMixin):
    """One layer's part of a storage: keys [slots, kv_heads, length, head_dim], values likewise."""

    is_sliding = False
    both: torch.Tensor | None = None  # keys and values [2, slots * kv_heads * length, head_dim], if of one width

    def __init__(self, owner: RowCache):
        super().__init__()
        self.owner = owner
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the storage is made by the cache."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """transformers' entry point; the step was planned by `RowCache.begin`."""
        step = self.owner.step
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        # Takes entries as they lie, where index_copy_ needs rows: a model's are transposed, and would be copied first.
        keys.view(-1, keys.shape[-1]).index_put_((step.index,), key_states)
        values.view(-1, values.shape[-1]).index_put_((step.index,), value_states)
        return self.held()

    def update_both(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` with keys and, behind their heads, values in one tensor [b, 2 * kv_heads, w, head_dim]."""
        keys, values, both = self.keys, self.values, self.both
        assert keys is not None
        assert values is not None
        assert both is not None
        both.index_put_((self.owner.sides, self.owner.step.index), entries.unflatten(1, (2, -1)).transpose(0, 1))
        return self.held()

    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `RowCache.places`."""
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        return self.owner.step.index, keys.view(-1, keys.shape[-1]), values.view(-1, values.shape[-1])

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the step's rows now hold."""
        step, keys, values = self.owner.step, self.keys, self.values
        assert keys is not None
        assert values is not None
        if step.first_slot is not None:
            return (
                keys.narrow(0, step.first_slot, step.num_rows).narrow(2, 0, step.kv_length),
                values.narrow(0, step.first_slot, step.num_rows).narrow(2, 0, step.kv_length),
            )
        assert step.slot_index is not None
        return (
            keys.narrow(2, 0, step.kv_length).index_select(0, step.slot_index),
            values.narrow(2, 0, step.kv_length).index_select(0, step.slot_index),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.step.kv_length, 0

    def get_seq_length(self) -> int:
        step = self.owner.step
        return step.kv_length - step.width

    def get_max_length(self) -> int:
        return self.owner.max_length

    def get_max_cache_shape(self) -> int:  # the name before transformers 5.2x
        return self.owner.max_length
