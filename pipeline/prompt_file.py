"""Prompts from a JSONL file, every line checked before anything is loaded.

A line is an object with one of "prompt" (a string), "messages" (a list of chat messages) and "token_ids" (a list of
integers), and perhaps "params" (sampling parameters of its own over the common ones) and "id" (a name of its own,
which its rollouts carry). Empty lines are passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pipeline.errors import InvalidRequest, short
from pipeline.params import NO_TEXT_FORM, SamplingParams
from pipeline.prompts import Prompted

KINDS = ("prompt", "messages", "token_ids")
MOST_SHOWN = 20
"""Bad lines that an error names."""


@dataclass(frozen=True)
class PromptLine:
    """One prompt of a file.

    Attributes:
        number: The line's, from 1.
        prompt: As `SpeculativePipeline.submit` takes it.
        params: The common ones with the line's own.
        id: The line's name, or None.
    """

    number: int
    prompt: Prompted
    params: SamplingParams
    id: str | None = None


def read_prompts(path: str | os.PathLike[str], params: SamplingParams) -> list[PromptLine]:
    """All prompts of a file.

    Args:
        path: A JSONL file in UTF-8.
        params: For lines without their own; a line's "params" replace single values. JSON's null is None; keys of
            "logit_bias" are token ids as strings, its values numbers or "-inf".

    Raises:
        InvalidRequest: Lines that are no prompts, each with its number; or no prompt at all.
        OSError: The file can't be read.
    """
    lines, bad = [], []
    seen: dict[str, int] = {}
    with Path(path).open("rb") as file:
        for number, content in enumerate(file, 1):
            if not content.strip():
                continue
            try:
                line = _line(number, content, params)
                if line.id is not None and seen.setdefault(line.id, number) != number:
                    raise InvalidRequest(f"id={line.id!r}, expected one that line {seen[line.id]} hasn't")
                lines.append(line)
            except InvalidRequest as error:
                bad.append(f"{os.fspath(path)}, line {number}: {error}")
    if bad:
        more = [f"and {len(bad) - MOST_SHOWN} more bad lines"] if len(bad) > MOST_SHOWN else []
        raise InvalidRequest("\n".join([*bad[:MOST_SHOWN], *more]))
    if not lines:
        raise InvalidRequest(f"prompts={os.fspath(path)!r}, expected at least one line with a prompt")
    return lines


def _line(number: int, content: bytes, params: SamplingParams) -> PromptLine:
    try:
        held = json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise InvalidRequest(f"{short(content)}, expected a JSON object: {error}") from None
    if not isinstance(held, dict):
        raise InvalidRequest(f"{short(held)}, expected a JSON object")
    for name in held:
        if name not in (*KINDS, "params", "id"):
            raise InvalidRequest(f"{name}={short(held[name])}, expected one of {', '.join(KINDS)}, params, id")
    kinds = [kind for kind in KINDS if kind in held]
    if len(kinds) != 1:
        raise InvalidRequest(f"{' and '.join(kinds) or 'no prompt'}, expected exactly one of {', '.join(KINDS)}")
    return PromptLine(number, _prompt(kinds[0], held[kinds[0]]), _params(held.get("params"), params), _id(held))


def _prompt(kind: str, value: Any) -> Prompted:
    if kind == "prompt":
        good, expected = isinstance(value, str) and value != "", "a string with at least one character"
    elif kind == "messages":
        good = _is_list(value) and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value)
        expected = "a list of objects, each with a role"
    else:
        good = _is_list(value) and all(type(token) is int and 0 <= token < 2**31 for token in value)
        expected = "a list of token ids"
    if not good:
        raise InvalidRequest(f"{kind}={short(value)}, expected {expected}")
    return value


def _params(own: Any, params: SamplingParams) -> SamplingParams:
    if own is None:
        return params
    if not isinstance(own, dict):
        raise InvalidRequest(f"params={short(own)}, expected an object of sampling parameters")
    allowed = [one.name for one in fields(SamplingParams) if one.name not in NO_TEXT_FORM]
    for name in own:
        if name not in allowed:
            raise InvalidRequest(f"params.{name}={short(own[name])}, expected one of {', '.join(allowed)}")
    if isinstance(own.get("logit_bias"), Mapping):
        own = own | {"logit_bias": _bias(own["logit_bias"])}
    return replace(params, **own)


def _bias(bias: Mapping[str, Any]) -> dict[Any, Any]:
    """JSON's keys are strings, and it has no infinity."""
    try:
        return {int(token): float(value) if value == "-inf" else value for token, value in bias.items()}
    except ValueError:
        raise InvalidRequest(f"params.logit_bias={short(bias)}, expected token ids as keys") from None


def _id(held: Mapping[str, Any]) -> str | None:
    value = held.get("id")
    if value is None:
        return None
    if type(value) not in (str, int):
        raise InvalidRequest(f"id={short(value)}, expected a string or an integer")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"id={value!a}, expected text that UTF-8 can hold") from None
    return str(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)
