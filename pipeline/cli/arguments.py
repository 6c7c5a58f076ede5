"""Command-line options from a dataclass: its fields' names, types and defaults, and the help from its docstring.

An option that a dataclass gains, loses or changes is so on the command line too.
"""

from __future__ import annotations

import argparse
import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def add_options(
    parser: argparse.ArgumentParser,
    cls: type,
    *,
    title: str,
    without: Collection[str] = (),
    readers: Mapping[str, tuple[str, Callable[[str], Any]]] = types.MappingProxyType({}),
) -> None:
    """Give the parser an option for every field of a dataclass.

    A boolean gets ``--name`` and ``--no-name``; a sequence takes several values, and the option may be repeated; a
    mapping takes KEY=VALUE pairs; where the field may be None, the word "none" is None.

    Args:
        cls: A dataclass whose fields all have defaults and are described under "Attributes:" in its docstring.
        title: Of the group in the help.
        without: Fields that have no text form.
        readers: For fields of other types than these: what the help calls the text, and what reads it.
    """
    group = parser.add_argument_group(title)
    hints, helps = get_type_hints(cls), field_help(cls)
    for one in fields(cls):
        if one.name in without:
            continue
        metavar, read = readers.get(one.name, (None, None))
        kind = _kind(hints[one.name]) if read is None else {"type": _or_none(read), "metavar": metavar}
        group.add_argument(
            "--" + one.name.replace("_", "-"),
            dest=one.name,
            default=argparse.SUPPRESS,
            help=_help(helps.get(one.name, ""), _default(one)),
            **kind,
        )


def given(options: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` that were given, by name; the others keep the dataclass's defaults."""
    names = {one.name for one in fields(cls)}
    return {name: value for name, value in vars(options).items() if name in names}


def field_help(cls: type) -> dict[str, str]:
    """What the docstring says of every field, under "Attributes:"; a line that names several counts for each."""
    text = inspect.getdoc(cls) or ""
    section = re.search(r"^Attributes:\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (section[1] if section else "").splitlines():
        if head := re.match(r"[ ]{4}(\w+(?:, \w+)*): (.*)", line):
            names = head[1].split(", ")
            found |= dict.fromkeys(names, head[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return {name: said.strip() for name, said in found.items()}


def _default(one: Field) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _help(said: str, default: Any) -> str:
    said = re.sub(r"`+([^`]*)`+", r"\1", said).rstrip(".")
    shown = "none" if default in (None, ()) else str(default)
    return f"{said} (default: {shown})".replace("%", "%%")


def _kind(hint: Any) -> dict[str, Any]:
    """The keywords of ``add_argument`` that read a value of this type."""
    optional, hints = _split(hint)
    first = hints[-1]  # of "str | Sequence[str]" the wider one
    origin = get_origin(first)
    if first is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        choices = get_args(first)
        if not optional:
            return {"choices": choices}
        return {"type": _or_none(str), "choices": (*choices, None), "metavar": "{" + ",".join((*choices, "none")) + "}"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": _pair(*get_args(first)), "action": _Entries, "nargs": "+", "metavar": "KEY=VALUE"}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        element = get_args(first)[0]
        return {"type": element, "action": "extend", "nargs": "+", "metavar": _metavar(element)}
    return {"type": _or_none(first) if optional else first, "metavar": _metavar(first)}


def _split(hint: Any) -> tuple[bool, list[Any]]:
    """Whether the type takes None, and its other members."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return type(None) in members, [member for member in members if member is not type(None)]


def _metavar(kind: type) -> str:
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}[kind]


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = getattr(kind, "__name__", "value")  # argparse names it in its error
    return read


def _pair(key: Callable[[str], Any], value: Callable[[str], Any]) -> Callable[[str], tuple[Any, Any]]:
    def read(text: str) -> tuple[Any, Any]:
        name, _, number = text.partition("=")
        return key(name), value(number)

    read.__name__ = "KEY=VALUE"
    return read


class _Entries(argparse.Action):
    """Gathers KEY=VALUE pairs of one or several occurrences in a dict."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **dict(values)})
