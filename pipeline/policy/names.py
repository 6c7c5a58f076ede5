"""What is said of a name that sampling parameters, or a pipeline's options, don't have."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

from pipeline.errors import InvalidRequest, short

T = TypeVar("T")


def refuse_unknown(cls: type[T]) -> type[T]:
    """Have the dataclass of sampling parameters raise `unknown_parameter`'s error where Python has a TypeError.

    Its signature, for a reader and for type checkers, stays.
    """
    init, known = cls.__init__, [one.name for one in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                raise unknown_parameter(name, values[name], known)
        init(self, *args, **values)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


def unknown_parameter(name: str, value: Any, known: Collection[str], place: str = "") -> InvalidRequest:
    """The error for a name that isn't one of the sampling parameters.

    Args:
        known: Those that are taken here.
        place: What the message has before the name.
    """
    from pipeline.running.state import Options  # which needs SamplingParams, whose names these are

    others = [one.name for one in fields(Options)]
    elsewhere = "an option of the pipeline: pass it to SpeculativePipeline"
    return _unknown(place + name, name, value, known, "a sampling parameter", others, elsewhere)


def unknown_option(name: str, value: Any, known: Collection[str]) -> InvalidRequest:
    """The error for a name that isn't one of a pipeline's options."""
    from pipeline.policy.params import SamplingParams

    others = [one.name for one in fields(SamplingParams)]
    elsewhere = "a sampling parameter: pass it to SamplingParams"
    return _unknown(name, name, value, known, "an option of the pipeline", others, elsewhere)


def _unknown(
    shown: str, name: str, value: Any, known: Collection[str], kind: str, others: Collection[str], elsewhere: str
) -> InvalidRequest:
    # A name that is right elsewhere is nearer than any that is nearly right here.
    nearest = get_close_matches(name, [*known, *others], 1)
    if not nearest:
        return InvalidRequest(f"{shown}={short(value)}, expected {kind}: one of {', '.join(known)}")
    hint = f"did you mean {nearest[0]}?" if nearest[0] in known else f"{nearest[0]} is {elsewhere}"
    return InvalidRequest(f"{shown}={short(value)}, expected {kind}; {hint}")
