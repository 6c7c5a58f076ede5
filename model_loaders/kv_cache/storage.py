"""The memory of a `RowCache`: it starts small and grows, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# The first allocation's length; later ones double it. Small enough not to matter for tiny models.
_FIRST_LENGTH = 64


class _Piece:
    """Some layers' keys [layers, slots, kv_heads, length, head_dim], and their values."""

    def __init__(self, layers: Sequence[Any], keys: torch.Tensor, values: torch.Tensor):
        self.layers = layers
        self.move_to(keys, values)

    def move_to(self, keys: torch.Tensor, values: torch.Tensor, both: torch.Tensor | None = None) -> None:
        """These tensors hold the entries from now on; both: where they lie in one, that one, [2, layers, ...]."""
        self.keys, self.values = keys, values
        for i, layer in enumerate(self.layers):
            layer.keys, layer.values = keys[i], values[i]
            layer.both = None if both is None else both[:, i].flatten(1, 3)


class Storage:
    """Keys and values of all layers, a piece for each group of layers.

    Args:
        groups: The `RowLayer`s whose entries lie in one tensor; each is told where its own are.
        num_kv_heads, head_dim, value_head_dim: Their attention shape.
        most_slots, most_length: What it may grow to.
        dtype, device: Of the entries.

    Attributes:
        slots, length: What there is memory for now.
        firsts: Where each slot's entry of position 0 is in a layer's keys, seen as [-1, head_dim]: int64
            [slots, kv_heads, 1].
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Any]],
        num_kv_heads: int,
        head_dim: int,
        value_head_dim: int,
        *,
        most_slots: int,
        most_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._num_kv_heads, self._head_dim, self._value_head_dim = num_kv_heads, head_dim, value_head_dim
        self._most_slots, self._most_length = most_slots, most_length
        self._dtype, self._device = dtype, device
        self.slots = self.length = 0
        self._pieces = [
            _Piece(own, *(self._zeros(len(own), 0, num_kv_heads, 0, dim) for dim in (head_dim, value_head_dim)))
            for own in groups
        ]
        self.firsts = self._first_entries(0, 0)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's entries in all layers."""
        num_layers = sum(len(piece.layers) for piece in self._pieces)
        return num_layers * self._num_kv_heads * (self._head_dim + self._value_head_dim) * self._dtype.itemsize

    def put(self, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores entries [layers, b, kv_heads, w, .] of all layers at a step's index [b, kv_heads, w]."""
        done = 0
        for piece in self._pieces:
            own = slice(done, done := done + len(piece.layers))
            piece.keys.flatten(1, 3)[:, index] = keys[own]
            piece.values.flatten(1, 3)[:, index] = values[own]

    def grow(self, slots: int, length: int, *, exact: bool = False) -> None:
        """Makes room for at least this many; unless exact, for more, so that growing is rare.

        Where memory runs out, everything is as before.
        """
        if slots <= self.slots and length <= self.length:
            return
        if not exact:
            if length > self.length:
                length = min(max(length, 2 * self.length, _FIRST_LENGTH), self._most_length)
            if slots > self.slots:
                slots = min(max(slots, 2 * self.slots), self._most_slots)
        slots, length = max(slots, self.slots), max(length, self.length)
        try:
            for piece in self._pieces:  # one by one, so that the peak is one above the result
                self._resize(piece, slots, length)
            firsts = self._first_entries(slots, length)
        except BaseException:
            # Out of memory halfway: all layers have one shape, or none can be written to.
            for piece in self._pieces:
                if piece.keys.shape[1:4:2] != (self.slots, self.length):
                    self._resize(piece, self.slots, self.length)
            raise
        self.slots, self.length, self.firsts = slots, length, firsts

    def _resize(self, piece: _Piece, slots: int, length: int) -> None:
        shape = len(piece.layers), slots, self._num_kv_heads, length
        both = self._zeros(2, *shape, self._head_dim) if self._head_dim == self._value_head_dim else None
        if both is None:
            made = self._zeros(*shape, self._head_dim), self._zeros(*shape, self._value_head_dim)
        else:
            made = both[0], both[1]
        for new, old in zip(made, (piece.keys, piece.values), strict=True):
            new[:, : self.slots, :, : self.length].copy_(old[:, : self.slots, :, : self.length])
        piece.move_to(*made, both)

    def _first_entries(self, slots: int, length: int) -> torch.Tensor:
        with torch.inference_mode(False):
            slot_heads = torch.arange(slots * self._num_kv_heads, device=self._device)
            return slot_heads.view(slots, self._num_kv_heads, 1) * length

    def _zeros(self, *shape: int) -> torch.Tensor:
        # zeros, not empty: masked garbage that happens to be NaN would poison the row.
        # Outside inference mode on purpose, so that any mode may write to it.
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
