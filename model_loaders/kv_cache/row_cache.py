"""The cache as models and drafts use it.

One step on many layers::

    cache.begin(positions, slots, kv_length=longest)   # index tensors, made once
    keys, values = cache.write(layer, new_keys, new_values)   # every layer

`RowCache` is also a transformers `Cache`: a model that gets it as its cache calls `update`, which
is `write` under transformers' name. It knows nothing of a model, so a draft uses it directly.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from model_loaders.kv_cache.layer import RowLayer
from model_loaders.kv_cache.snapshot import RowSnapshot
from model_loaders.kv_cache.step import DeviceSlots, Slots, Step, checked_kv_length, run_or_index
from model_loaders.kv_cache.storage import Storage


class RowCache(Cache):
    """Keys and values of `num_slots` independent rows of up to `max_length` tokens.

    Args:
        num_layers, num_kv_heads, head_dim: the model's attention shape; `value_head_dim` where the
            values' width differs from the keys'.
        num_slots: rows; slots are 0..num_slots-1.
        max_length: entries a row can hold, block entries that may be rejected included.
        dtype, device: of the stored keys and values.
        together: all layers in one storage, which `write_layers` then fills at once. To grow it takes memory for the
            old and the new one, and otherwise for one layer more than it grows to.

    Storage starts small and grows (lengths doubling up to `max_length`, slots up to `num_slots`);
    `reserve` allocates ahead, so that addresses stay fixed (CUDA graphs).

    Raises ValueError (`name=value, expected ...`) for sizes below 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        value_head_dim: int | None = None,
        together: bool = False,
    ):
        sizes = {
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "num_slots": num_slots,
            "max_length": max_length,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size}, expected at least 1")
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_head_dim = head_dim if value_head_dim is None else value_head_dim
        self.num_slots = num_slots
        self.max_length = max_length
        self.dtype = dtype
        self.device = torch.device(device)
        self._step: Step | None = None
        self._rows: list[Any] = [RowLayer(self) for _ in range(num_layers)]
        self._storage = Storage(
            [self._rows] if together else [[layer] for layer in self._rows],
            num_kv_heads,
            head_dim,
            self.value_head_dim,
            most_slots=num_slots,
            most_length=max_length,
            dtype=dtype,
            device=self.device,
        )
        with torch.inference_mode(False):
            self.sides = torch.arange(2, device=self.device).view(2, 1, 1, 1)
        super().__init__(layers=self._rows)

    @property
    def step(self) -> Step:
        """The step planned by `begin`. Raises RuntimeError before the first one."""
        if self._step is None:
            raise RuntimeError("the cache has no step: call begin(positions, slots) first")
        return self._step

    @property
    def allocated(self) -> tuple[int, int]:
        """(slots, entries a slot) that have storage now."""
        return self._storage.slots, self._storage.length

    def begin(
        self,
        positions: torch.Tensor,
        slots: Slots = None,
        *,
        kv_length: int | None = None,
        kept: torch.Tensor | None = None,
    ) -> int:
        """Plans a step: the entries that follow go to `positions` of `slots`, on every layer.

        Args:
            positions: int64 [b, w], the absolute token positions; distinct within a row.
            slots: the b rows' slots, distinct; None: slots 0..b-1. A list is best (a CUDA tensor costs
                a synchronisation; `DeviceSlots` aren't looked at). A run of neighbouring slots is read
                without copying its history; other sets of slots are gathered each step.
            kv_length: more than every position, and what the step reads of each row. None: computed
                from positions, which on CUDA costs a synchronisation.
            kept: int64 [n], ascending: only these of the b*w entries (row-major) follow, as one row of n
                ([1, kv_heads, n, head_dim] on every layer); what is read is as for all. None: all.

        Returns kv_length. Raises ValueError (`name=value, expected ...`) for a wrong shape, slot or length.
        """
        kv_length = checked_kv_length(positions, kv_length, self.max_length)
        num_rows, width = positions.shape
        first_slot, slot_index, top_slot = self._resolve_slots(slots, num_rows)
        self._storage.grow(top_slot + 1, kv_length)
        if slot_index is None:
            firsts = self._storage.firsts.narrow(0, first_slot or 0, num_rows)
        else:
            firsts = self._storage.firsts.index_select(0, slot_index)
        positions = positions.to(self.device, non_blocking=True)
        if kept is not None:
            firsts = firsts.index_select(0, kept // width).transpose(0, 2)
            positions = positions.reshape(1, -1).index_select(1, kept)
        index = (firsts + positions[:, None]).contiguous()
        self._step = Step(num_rows, width, kv_length, index, first_slot, slot_index)
        return kv_length

    def write(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor | None = None,
        slots: Slots = None,
        *,
        kv_length: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys and values [b, kv_heads, w, head_dim] of one layer; returns what its rows now hold.

        `positions`, `slots` and `kv_length` as in `begin`; without positions the planned step is used.

        Returns keys [b, kv_heads, kv_length, head_dim] and values likewise: views of the storage when the
        slots are a run of neighbours (valid until it grows), copies otherwise. Entries beyond a row's own
        positions are stale or zero, for the attention mask to hide.
        """
        if positions is not None:
            self.begin(positions, slots, kv_length=kv_length)
        step = self.step
        want_keys = (step.num_rows, self.num_kv_heads, step.width, self.head_dim)
        want_values = (step.num_rows, self.num_kv_heads, step.width, self.value_head_dim)
        if tuple(keys.shape) != want_keys:
            raise ValueError(f"keys={list(keys.shape)}, expected {list(want_keys)}")
        if tuple(values.shape) != want_values:
            raise ValueError(f"values={list(values.shape)}, expected {list(want_values)}")
        return self._rows[layer].update(keys, values)

    def write_both(self, layer: int, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`write`, by the planned step, of keys and, behind their heads, values [b, 2 * kv_heads, w, head_dim].

        One kernel on a GPU instead of two. Only for keys and values of one width.
        """
        return self._rows[layer].update_both(entries)

    def places(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where the planned step's entries of a layer go, for a kernel that stores them itself.

        index int64 [b, kv_heads, w], contiguous; keys and values [n, head_dim] and [n, value_head_dim], contiguous: all
        of the layer's memory.
        """
        return self._rows[layer].places()

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the planned step's rows now hold, as `write` returns it."""
        return self._rows[layer].held()

    def write_layers(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [layers, b, kv_heads, w, head_dim] of all layers, by the planned step."""
        step = self.step
        for name, entries, width in (("keys", keys, self.head_dim), ("values", values, self.value_head_dim)):
            want = (self.num_layers, step.num_rows, self.num_kv_heads, step.width, width)
            if tuple(entries.shape) != want:
                raise ValueError(f"{name}={list(entries.shape)}, expected {list(want)}")
        self._storage.put(step.index, keys, values)

    def reserve(self, num_slots: int | None = None, length: int | None = None) -> None:
        """Allocates storage ahead; the defaults are num_slots and max_length, after which it never moves."""
        num_slots = self.num_slots if num_slots is None else num_slots
        length = self.max_length if length is None else length
        if not 0 < num_slots <= self.num_slots:
            raise ValueError(f"num_slots={num_slots}, expected 1 to {self.num_slots}")
        if not 0 < length <= self.max_length:
            raise ValueError(f"length={length}, expected 1 to {self.max_length}")
        self._storage.grow(num_slots, length, exact=True)

    def snapshot(self, slot: int, length: int) -> RowSnapshot:
        """Copies the first `length` entries of a slot out of the cache."""
        self._check_row("slot", slot, length)
        keys, values = [], []
        for layer in self._rows:
            keys.append(layer.keys[slot, :, :length].clone())
            values.append(layer.values[slot, :, :length].clone())
        return RowSnapshot(length, tuple(keys), tuple(values))

    def restore(self, slot: int, snapshot: RowSnapshot) -> None:
        """Puts a snapshot's entries at the start of a slot, of this cache or of another of the same shape."""
        self._check_slot("slot", slot)
        if len(snapshot.keys) != self.num_layers:
            raise ValueError(f"snapshot={len(snapshot.keys)} layers, expected {self.num_layers}")
        if snapshot.length > self.max_length:
            raise ValueError(f"snapshot.length={snapshot.length}, expected at most {self.max_length}")
        self._storage.grow(slot + 1, snapshot.length)
        for layer, keys, values in zip(self._rows, snapshot.keys, snapshot.values, strict=True):
            layer.keys[slot, :, : snapshot.length].copy_(keys)
            layer.values[slot, :, : snapshot.length].copy_(values)

    def copy_row(self, src: int, dst: int, length: int) -> None:
        """Copies the first `length` entries of slot `src` to slot `dst`."""
        self._check_row("src", src, length)
        self._check_slot("dst", dst)
        if src == dst:
            return
        self._storage.grow(dst + 1, length)
        for layer in self._rows:
            layer.keys[dst, :, :length].copy_(layer.keys[src, :, :length])
            layer.values[dst, :, :length].copy_(layer.values[src, :, :length])

    def release(self, slot: int) -> None:
        """Zeroes a slot. Needed after a row with NaN or infinite entries, harmless otherwise.

        A masked entry has weight 0, but 0 * NaN is NaN: stale NaNs would reach the slot's next row.
        """
        self._check_slot("slot", slot)
        if slot < self._storage.slots:
            for layer in self._rows:
                layer.keys[slot].zero_()
                layer.values[slot].zero_()

    def memory_bytes(self) -> int:
        """Bytes of storage allocated now."""
        return self._storage.slots * self._storage.length * self._storage.entry_bytes

    def full_bytes(self) -> int:
        """Bytes of storage once all is allocated."""
        return self.num_slots * self.max_length * self._storage.entry_bytes

    def _resolve_slots(self, slots: Slots, num_rows: int) -> tuple[int | None, torch.Tensor | None, int]:
        """-> (first slot of a run or None, slot index or None, highest slot)."""
        if isinstance(slots, DeviceSlots):
            if self.allocated != (self.num_slots, self.max_length):
                raise ValueError(f"slots={slots!r}, expected storage that never moves: call reserve() first")
            return None, slots.index, self.num_slots - 1
        return run_or_index(slots, num_rows, self.num_slots, self.device)

    def _check_slot(self, name: str, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"{name}={slot}, expected 0..{self.num_slots - 1}")

    def _check_row(self, name: str, slot: int, length: int) -> None:
        self._check_slot(name, slot)
        stored = self._storage.length if slot < self._storage.slots else 0
        if not 0 <= length <= stored:
            raise ValueError(f"length={length}, expected 0..{stored}, the entries that slot {slot} has storage for")
