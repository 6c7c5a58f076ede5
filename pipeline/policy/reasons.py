"""Refusals of one kind: the same name and expectation, whatever the value."""

from __future__ import annotations

import re

_VALUE = re.compile(r"^((?:[\w.: ]+=)?).*?(?=, expected )", re.DOTALL)
_NUMBER = re.compile(r"\d+")


def kind_of(reason: str) -> str:
    """What reasons of one kind have in common: neither the value before ", expected" nor any number."""
    return _NUMBER.sub("0", _VALUE.sub(r"\1", reason, count=1))
