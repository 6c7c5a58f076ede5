"""Fields of records that a stage fills with arrays wherever they are, and that everybody else reads as NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

import gpu

Record = TypeVar("Record")


def read_on_host(*names: str) -> Callable[[type[Record]], type[Record]]:
    """Make these fields of a dataclass what `on_host` makes of them, at the first look; `held` gives it as it is.

    The copy can't be written to: who changes what a stage made puts a new record in its place (`dataclasses.replace`).
    """

    def change(kind: type[Record]) -> type[Record]:
        for name in names:
            setattr(kind, name, _Field(name))
        return kind

    return change


def held(record: Any, name: str) -> Any:
    """The field as it was filled: arrays on the host or on a device."""
    return record.__dict__[_HELD + name]


def on_host(value: Any) -> Any:
    """What a device holds, on the host; of laws by logits the probabilities, float32 [B, D, V]."""
    value = gpu.to_host(value)
    return gpu.dense_law(value) if isinstance(value, gpu.LogitsLaw) else value


_HELD, _COPIED = "_held_", "_copied_"


class _Field:
    """Reads and fills one field of a record."""

    def __init__(self, name: str):
        self._held, self._copied = _HELD + name, _COPIED + name

    def __get__(self, record: Any, kind: type) -> Any:
        if record is None:
            return self
        values = record.__dict__
        if self._copied not in values:
            copied = on_host(values[self._held])
            if copied is not values[self._held]:
                _protect(copied)
            values[self._copied] = copied
        return values[self._copied]

    def __set__(self, record: Any, value: Any) -> None:
        record.__dict__[self._held] = value


def _protect(value: Any) -> None:
    for array in [getattr(value, one.name) for one in fields(value)] if is_dataclass(value) else [value]:
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
