"""Where the entries of one forward go, worked out once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceSlots:
    """Slots that only the device knows, int64 [b] there, distinct: for CUDA graphs, over storage reserved whole."""

    index: torch.Tensor


Slots = Sequence[int] | torch.Tensor | DeviceSlots | None


@dataclass(frozen=True)
class Step:
    """Where the entries of one forward go, shared by all layers.

    num_rows, width: of the block. kv_length: entries of each row that are read.
    index: int64 [b, kv_heads, w], contiguous: where entries go in a layer's storage seen as [-1, head_dim].
    first_slot: the rows are the slots from here on (a view), or None: gather by slot_index, int64 [b].
    """

    num_rows: int
    width: int
    kv_length: int
    index: torch.Tensor
    first_slot: int | None
    slot_index: torch.Tensor | None


def checked_kv_length(positions: torch.Tensor, kv_length: int | None, max_length: int) -> int:
    """How many entries of each row a step at these positions reads; None: up to the last position.

    positions int64 [b, w]. Of positions on a GPU it is taken at its word, as looking costs a synchronisation.

    Raises ValueError (`name=value, expected ...`).
    """
    if positions.ndim != 2 or positions.dtype != torch.int64:
        raise ValueError(f"positions={positions.dtype} {list(positions.shape)}, expected int64 [b, w]")
    if kv_length is None or positions.device.type == "cpu":
        low, high = (int(x) for x in torch.aminmax(positions)) if positions.numel() else (0, -1)
        if low < 0:
            raise ValueError(f"positions={low}, expected at least 0")
        if kv_length is None:
            kv_length = high + 1
        elif kv_length <= high:
            raise ValueError(f"kv_length={kv_length}, expected more than the position {high}")
    if kv_length > max_length:
        raise ValueError(
            f"kv_length={kv_length}, expected at most max_length={max_length}: make the cache with a larger max_length"
        )
    return kv_length


def run_or_index(
    slots: Sequence[int] | torch.Tensor | None, num_rows: int, num_slots: int, device: torch.device
) -> tuple[int | None, torch.Tensor | None, int]:
    """-> (first slot of a run of neighbours or None, slot index int64 [b] on the device or None, highest slot).

    Raises ValueError (`name=value, expected ...`) unless they are num_rows distinct ones of num_slots.
    """
    if slots is None:
        if num_rows > num_slots:
            raise ValueError(f"positions={num_rows} rows, expected at most num_slots={num_slots}")
        return 0, None, num_rows - 1
    listed = [int(s) for s in (slots.tolist() if isinstance(slots, torch.Tensor) else slots)]
    if len(listed) != num_rows or len(set(listed)) != num_rows:
        raise ValueError(f"slots={listed}, expected {num_rows} distinct slots")
    if listed and not 0 <= min(listed) <= max(listed) < num_slots:
        raise ValueError(f"slots={listed}, expected each in 0..{num_slots - 1}")
    if listed == list(range(listed[0], listed[0] + num_rows)):
        return listed[0], None, listed[-1]
    index = slots if isinstance(slots, torch.Tensor) else torch.tensor(listed)
    return None, index.to(device, torch.int64), max(listed)
