"""A prompt of a file, from a line of JSON or a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pipeline.errors import InvalidRequest, short, shown_name
from pipeline.policy.names import unknown_name
from pipeline.policy.params import NO_TEXT_FORM, SamplingParams
from pipeline.prompt_file.contents import FIELDS, KINDS, json_object
from pipeline.prompts import Prompted

_PARAMETERS = [one.name for one in fields(SamplingParams) if one.name not in NO_TEXT_FORM]


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


def prompt_line(number: int, content: bytes | dict[str, Any], params: SamplingParams) -> PromptLine:
    """The prompt of one of `contents`, its own parameters over these.

    Raises:
        InvalidRequest: It is no prompt, or a parameter is out of range.
    """
    held = content if isinstance(content, dict) else json_object(content)
    for name in held:
        if name not in FIELDS:
            hint = '; sampling parameters go into "params"' if name in _PARAMETERS else ""
            raise InvalidRequest(f"{shown_name(name)}={short(held[name])}, expected one of {', '.join(FIELDS)}{hint}")
    kinds = [kind for kind in KINDS if kind in held]
    if len(kinds) != 1:
        raise InvalidRequest(f"{' and '.join(kinds) or 'no prompt'}, expected exactly one of {', '.join(KINDS)}")
    own = held.get("params")
    if isinstance(content, dict) and isinstance(own, str):
        own = json_object(own.encode("utf-8", "replace"))
    return PromptLine(number, _prompt(kinds[0], held[kinds[0]]), _params(own, params), _id(held))


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
    for name in own:
        if name not in _PARAMETERS:
            raise unknown_name(SamplingParams, name, own[name], known=_PARAMETERS, place="params.")
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
