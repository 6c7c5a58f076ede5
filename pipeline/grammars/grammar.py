"""A grammar as a user writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pipeline.errors import InvalidRequest, short

Kind = Literal["json_schema", "regex", "ebnf"]
KINDS: tuple[Kind, ...] = get_args(Kind)

EXPECTED = 'None, or a mapping with one of "json_schema" (a schema or its JSON text), "regex" and "ebnf" (text)'


@dataclass(frozen=True)
class Grammar:
    """What an output must be. Whether xgrammar takes it is seen when it meets a target.

    Attributes:
        kind: "json_schema", "regex" (of the whole output) or "ebnf" (GBNF; its start is the rule "root").
        source: The text: a schema as JSON.
    """

    kind: Kind
    source: str

    @classmethod
    def of(cls, value: Any) -> Grammar:
        """From a mapping of one of KINDS to the source; a schema may be a mapping, or true.

        Raises:
            InvalidRequest: Anything else.
        """
        if isinstance(value, Grammar):
            value = value.to_dict()
        if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in KINDS:
            raise InvalidRequest(f"grammar={short(value)}, expected {EXPECTED}")
        [(kind, source)] = value.items()
        if kind == "json_schema" and isinstance(source, (Mapping, bool)):
            try:
                source = json.dumps(source, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"grammar={short(value)}, expected a schema that JSON can hold: {error}") from None
        if not isinstance(source, str):
            raise InvalidRequest(f"grammar={short(value)}, expected {EXPECTED}")
        return cls(kind, source)

    def to_dict(self) -> dict[str, str]:
        """As `of` takes it."""
        return {self.kind: self.source}
