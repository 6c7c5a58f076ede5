"""What is said of a name that a dataclass of settings doesn't have: the nearest name that it, or another one, has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from pipeline.errors import InvalidRequest, short, shown_name

T = TypeVar("T")


@dataclass(frozen=True)
class _Known:
    """The names of one dataclass, what a name of them is called, and who takes it."""

    names: list[str]
    what: str
    taken_by: str


_CLASSES: dict[type, _Known] = {}


def with_known_names(what: str, taken_by: str) -> Callable[[type[T]], type[T]]:
    """Have a dataclass raise `unknown_name`'s error where Python has a TypeError, and its names be known to others.

    Its signature, for a reader and for type checkers, stays.

    Args:
        what: What a message calls one of its fields, with its article.
        taken_by: What a user passes them to.
    """

    def known(cls: type[T]) -> type[T]:
        init, names = cls.__init__, [one.name for one in fields(cls)]  # type: ignore[arg-type]
        _CLASSES[cls] = _Known(names, what, taken_by)

        @functools.wraps(init)
        def checked(self: T, *args: Any, **values: Any) -> None:
            for name in values:
                if name not in names:
                    raise unknown_name(cls, name, values[name])
            init(self, *args, **values)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return known


def unknown_name(
    cls: type, name: str, value: Any, *, known: Collection[str] | None = None, place: str = ""
) -> InvalidRequest:
    """The error for a name that a class which has known names doesn't have.

    Args:
        known: Those of its names that are taken here; None: all.
        place: What the message has before the name.
    """
    own = _CLASSES[cls]
    known = own.names if known is None else known
    others = {other: one for one in _CLASSES.values() if one is not own for other in one.names}
    shown = f"{place}{shown_name(name)}={short(value)}, expected {own.what}"
    if name in own.names:
        return InvalidRequest(f"{shown} that can be given here: one of {', '.join(known)}")
    # A name that is right elsewhere is nearer than any that is nearly right here.
    nearest = next(iter(get_close_matches(name, [*known, *others], 1)), None)
    if nearest is None:
        return InvalidRequest(f"{shown}: one of {', '.join(known)}")
    if nearest in known:
        return InvalidRequest(f"{shown}; did you mean {nearest}?")
    right = others[nearest]
    return InvalidRequest(f"{shown}; {nearest} is {right.what}: pass it to {right.taken_by}")
