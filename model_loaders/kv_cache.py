"""A key-value cache whose rows have lengths of their own.

A row lives in a slot. The cache index of an entry IS its token's absolute position: new keys and
values are scattered to [slot, head, position], and an entry beyond a row's own query positions is
hidden by the attention mask, so rejected drafts are simply overwritten later. There is no padding
on the left and no crop.

One step on many layers::

    cache.begin(positions, slots, kv_length=longest)   # index tensors, made once
    keys, values = cache.write(layer, new_keys, new_values)   # every layer

`RowCache` is also a transformers `Cache`: a model that gets it as its cache calls `update`, which
is `write` under transformers' name. It knows nothing of a model, so a draft uses it directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# The first allocation's length; later ones double it. Small enough not to matter for tiny models.
_FIRST_LENGTH = 64


@dataclass(frozen=True)
class DeviceSlots:
    """Slots that only the device knows, int64 [b] there, distinct: for CUDA graphs, over storage reserved whole."""

    index: torch.Tensor


Slots = Sequence[int] | torch.Tensor | DeviceSlots | None


@dataclass(frozen=True)
class RowSnapshot:
    """The first `length` entries of one row, copied out of the cache.

    keys, values: for each layer [kv_heads, length, head_dim], the cache's dtype and device.
    """

    length: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def memory_bytes(self) -> int:
        """Bytes held by the copied keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


@dataclass(frozen=True)
class _Step:
    """Where the entries of one forward go, shared by all layers."""

    num_rows: int
    width: int
    kv_length: int
    index: torch.Tensor  # int64 [b, kv_heads, w]: where entries go in a layer's storage seen as [-1, head_dim]
    first_slot: int | None  # rows are slots first_slot.. (a view), or None: gather by slot_index
    slot_index: torch.Tensor | None  # int64 [b]


class _Storage:
    """Some layers' keys [layers, slots, kv_heads, length, head_dim], and their values."""

    def __init__(self, layers: Sequence[Any], keys: torch.Tensor, values: torch.Tensor):
        self.layers = layers
        self.move_to(keys, values)

    def move_to(self, keys: torch.Tensor, values: torch.Tensor, both: torch.Tensor | None = None) -> None:
        """These tensors are the storage from now on; both: where they lie in one, that one, [2, layers, ...]."""
        self.keys, self.values = keys, values
        for i, layer in enumerate(self.layers):
            layer.keys, layer.values = keys[i], values[i]
            layer.both = None if both is None else both[:, i].flatten(1, 3)


class _RowLayer(CacheLayerMixin):
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
        return self._held(keys, values)

    def update_both(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` with keys and, behind their heads, values in one tensor [b, 2 * kv_heads, w, head_dim]."""
        keys, values, both = self.keys, self.values, self.both
        assert keys is not None
        assert values is not None
        assert both is not None
        both.index_put_((self.owner.sides, self.owner.step.index), entries.unflatten(1, (2, -1)).transpose(0, 1))
        return self._held(keys, values)

    def _held(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the step's rows now hold."""
        step = self.owner.step
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
        self._slots = 0
        self._length = 0
        self._step: _Step | None = None
        self._rows: list[Any] = [_RowLayer(self) for _ in range(num_layers)]
        self._storages = [
            _Storage(own, *(self._zeros(len(own), 0, num_kv_heads, 0, dim) for dim in (head_dim, self.value_head_dim)))
            for own in ([self._rows] if together else [[layer] for layer in self._rows])
        ]
        self._firsts = self._first_entries(0, 0)
        with torch.inference_mode(False):
            self.sides = torch.arange(2, device=self.device).view(2, 1, 1, 1)
        super().__init__(layers=self._rows)

    @property
    def step(self) -> _Step:
        """The step planned by `begin`. Raises RuntimeError before the first one."""
        if self._step is None:
            raise RuntimeError("the cache has no step: call begin(positions, slots) first")
        return self._step

    @property
    def allocated(self) -> tuple[int, int]:
        """(slots, entries a slot) that have storage now."""
        return self._slots, self._length

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
        if positions.ndim != 2 or positions.dtype != torch.int64:
            raise ValueError(f"positions={positions.dtype} {list(positions.shape)}, expected int64 [b, w]")
        num_rows, width = positions.shape
        if kv_length is None or positions.device.type == "cpu":
            low, high = (int(x) for x in torch.aminmax(positions)) if positions.numel() else (0, -1)
            if low < 0:
                raise ValueError(f"positions={low}, expected at least 0")
            if kv_length is None:
                kv_length = high + 1
            elif kv_length <= high:
                raise ValueError(f"kv_length={kv_length}, expected more than the position {high}")
        if kv_length > self.max_length:
            raise ValueError(
                f"kv_length={kv_length}, expected at most max_length={self.max_length}: "
                "make the cache with a larger max_length"
            )
        first_slot, slot_index, top_slot = self._resolve_slots(slots, num_rows)
        self._grow(top_slot + 1, kv_length)
        if slot_index is None:
            firsts = self._firsts.narrow(0, first_slot or 0, num_rows)
        else:
            firsts = self._firsts.index_select(0, slot_index)
        positions = positions.to(self.device, non_blocking=True)
        if kept is not None:
            firsts = firsts.index_select(0, kept // width).transpose(0, 2)
            positions = positions.reshape(1, -1).index_select(1, kept)
        index = firsts + positions[:, None]
        self._step = _Step(num_rows, width, kv_length, index, first_slot, slot_index)
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

    def write_layers(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [layers, b, kv_heads, w, head_dim] of all layers, by the planned step."""
        step = self.step
        for name, entries, width in (("keys", keys, self.head_dim), ("values", values, self.value_head_dim)):
            want = (self.num_layers, step.num_rows, self.num_kv_heads, step.width, width)
            if tuple(entries.shape) != want:
                raise ValueError(f"{name}={list(entries.shape)}, expected {list(want)}")
        done = 0
        for storage in self._storages:
            own = slice(done, done := done + len(storage.layers))
            storage.keys.flatten(1, 3)[:, step.index] = keys[own]
            storage.values.flatten(1, 3)[:, step.index] = values[own]

    def reserve(self, num_slots: int | None = None, length: int | None = None) -> None:
        """Allocates storage ahead; the defaults are num_slots and max_length, after which it never moves."""
        num_slots = self.num_slots if num_slots is None else num_slots
        length = self.max_length if length is None else length
        if not 0 < num_slots <= self.num_slots:
            raise ValueError(f"num_slots={num_slots}, expected 1 to {self.num_slots}")
        if not 0 < length <= self.max_length:
            raise ValueError(f"length={length}, expected 1 to {self.max_length}")
        self._grow(num_slots, length, exact=True)

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
        self._grow(slot + 1, snapshot.length)
        for layer, keys, values in zip(self._rows, snapshot.keys, snapshot.values, strict=True):
            layer.keys[slot, :, : snapshot.length].copy_(keys)
            layer.values[slot, :, : snapshot.length].copy_(values)

    def copy_row(self, src: int, dst: int, length: int) -> None:
        """Copies the first `length` entries of slot `src` to slot `dst`."""
        self._check_row("src", src, length)
        self._check_slot("dst", dst)
        if src == dst:
            return
        self._grow(dst + 1, length)
        for layer in self._rows:
            layer.keys[dst, :, :length].copy_(layer.keys[src, :, :length])
            layer.values[dst, :, :length].copy_(layer.values[src, :, :length])

    def release(self, slot: int) -> None:
        """Zeroes a slot. Needed after a row with NaN or infinite entries, harmless otherwise.

        A masked entry has weight 0, but 0 * NaN is NaN: stale NaNs would reach the slot's next row.
        """
        self._check_slot("slot", slot)
        if slot < self._slots:
            for layer in self._rows:
                layer.keys[slot].zero_()
                layer.values[slot].zero_()

    def memory_bytes(self) -> int:
        """Bytes of storage allocated now."""
        return self._slots * self._length * self._entry_bytes()

    def full_bytes(self) -> int:
        """Bytes of storage once all is allocated."""
        return self.num_slots * self.max_length * self._entry_bytes()

    def _entry_bytes(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.value_head_dim) * self.dtype.itemsize

    def _resolve_slots(self, slots: Slots, num_rows: int) -> tuple[int | None, torch.Tensor | None, int]:
        """-> (first slot of a run or None, slot index or None, highest slot)."""
        if slots is None:
            if num_rows > self.num_slots:
                raise ValueError(f"positions={num_rows} rows, expected at most num_slots={self.num_slots}")
            return 0, None, num_rows - 1
        if isinstance(slots, DeviceSlots):
            if self.allocated != (self.num_slots, self.max_length):
                raise ValueError(f"slots={slots!r}, expected storage that never moves: call reserve() first")
            return None, slots.index, self.num_slots - 1
        listed = [int(s) for s in (slots.tolist() if isinstance(slots, torch.Tensor) else slots)]
        if len(listed) != num_rows or len(set(listed)) != num_rows:
            raise ValueError(f"slots={listed}, expected {num_rows} distinct slots")
        if listed and not 0 <= min(listed) <= max(listed) < self.num_slots:
            raise ValueError(f"slots={listed}, expected each in 0..{self.num_slots - 1}")
        if listed == list(range(listed[0], listed[0] + num_rows)):
            return listed[0], None, listed[-1]
        index = slots if isinstance(slots, torch.Tensor) else torch.tensor(listed)
        return None, index.to(self.device, torch.int64), max(listed)

    def _grow(self, slots: int, length: int, *, exact: bool = False) -> None:
        if slots <= self._slots and length <= self._length:
            return
        if not exact:
            if length > self._length:
                length = min(max(length, 2 * self._length, _FIRST_LENGTH), self.max_length)
            if slots > self._slots:
                slots = min(max(slots, 2 * self._slots), self.num_slots)
        slots, length = max(slots, self._slots), max(length, self._length)
        try:
            for storage in self._storages:  # one by one, so that the peak is one above the result
                self._resize(storage, slots, length)
            firsts = self._first_entries(slots, length)
        except BaseException:
            # Out of memory halfway: all layers have one shape, or none can be written to.
            for storage in self._storages:
                if storage.keys.shape[1:4:2] != (self._slots, self._length):
                    self._resize(storage, self._slots, self._length)
            raise
        self._slots, self._length, self._firsts = slots, length, firsts

    def _resize(self, storage: _Storage, slots: int, length: int) -> None:
        shape = len(storage.layers), slots, self.num_kv_heads, length
        both = self._zeros(2, *shape, self.head_dim) if self.head_dim == self.value_head_dim else None
        if both is None:
            made = self._zeros(*shape, self.head_dim), self._zeros(*shape, self.value_head_dim)
        else:
            made = both[0], both[1]
        for new, old in zip(made, (storage.keys, storage.values), strict=True):
            new[:, : self._slots, :, : self._length].copy_(old[:, : self._slots, :, : self._length])
        storage.move_to(*made, both)

    def _first_entries(self, slots: int, length: int) -> torch.Tensor:
        """Where each slot's entry of position 0 is in a layer's storage, int64 [slots, kv_heads, 1]."""
        with torch.inference_mode(False):
            slot_heads = torch.arange(slots * self.num_kv_heads, device=self.device)
            return slot_heads.view(slots, self.num_kv_heads, 1) * length

    def _zeros(self, *shape: int) -> torch.Tensor:
        # zeros, not empty: masked garbage that happens to be NaN would poison the row.
        # Outside inference mode on purpose, so that any mode may write to it.
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _check_slot(self, name: str, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"{name}={slot}, expected 0..{self.num_slots - 1}")

    def _check_row(self, name: str, slot: int, length: int) -> None:
        self._check_slot(name, slot)
        stored = self._length if slot < self._slots else 0
        if not 0 <= length <= stored:
            raise ValueError(f"length={length}, expected 0..{stored}, the entries that slot {slot} has storage for")
