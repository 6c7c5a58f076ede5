"""Prompts from a JSONL or Parquet file of any size: checked before anything is loaded, then read a shard at a time.

A line of a JSONL file is an object with one of "prompt" (a string), "messages" (a list of chat messages) and
"token_ids" (a list of integers), and perhaps "params" (sampling parameters of its own over the common ones) and "id" (a
name of its own, which its rollouts carry). Empty lines are passed over. A Parquet file (``*.parquet``) has columns of
these names, with null for what a row doesn't have; "params" is a struct, or JSON text (which a "logit_bias" needs).

Checking holds no more than a line or a row group, and eight bytes a prompt with an id; reading, a shard's prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import InvalidRequest, short
from pipeline.grammars.compiler import check_grammar
from pipeline.grammars.grammar import Grammar
from pipeline.params import NO_TEXT_FORM, SamplingParams
from pipeline.prompts import Prompted

KINDS = ("prompt", "messages", "token_ids")
MOST_SHOWN = 20
"""Bad lines that an error names."""
LONGEST_LINE = 1 << 26
"""Bytes of a line of JSON; a longer one is refused instead of held."""
_ROWS = 256


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


class Shard(NamedTuple):
    """A run of consecutive prompts.

    Attributes:
        place: Where it begins: a byte of a JSONL file, a row of a Parquet file.
        number: The line, or row, that begins there, from 1.
        first: Its first prompt's index among all prompts of the file.
        num_prompts, num_samples: Prompts, and the sum of their `n`.
    """

    place: int
    number: int
    first: int
    num_prompts: int
    num_samples: int


@dataclass(frozen=True)
class PromptScan:
    """What a whole prompts file holds.

    Attributes:
        sha256: Of the file.
        shards: Its prompts in runs, in order.
    """

    sha256: str
    shards: list[Shard]


def scan_prompts(path: str | os.PathLike[str], params: SamplingParams, shard_size: int) -> PromptScan:
    """Check all prompts of a file and divide them into shards.

    Args:
        path: JSONL in UTF-8, or Parquet.
        params: For lines without their own; a line's "params" replace single values. JSON's null is None; keys of
            "logit_bias" are token ids as strings, its values numbers or "-inf".
        shard_size: Samples a shard, at least; those of a prompt aren't parted.

    Raises:
        InvalidRequest: Lines that are no prompts or whose grammar doesn't compile, each with its number; no prompt at
            all; common parameters with such a grammar.
        OSError: The file can't be read.
    """
    path, bad, digests = Path(path), _BadLines(path), array("Q")
    shards: list[Shard] = []
    place = number = first = num_prompts = num_samples = 0
    if params.grammar is not None:  # once, not for every line
        check_grammar(Grammar.of(params.grammar))
    before = file_sha256(path)
    for at, line_number, content in _contents(path, 0, 1):
        try:
            line = _line(line_number, content, params)
            if line.params.grammar is not None:
                check_grammar(Grammar.of(line.params.grammar))
        except InvalidRequest as error:
            bad.add(line_number, str(error))
            continue
        if line.id is not None:
            digests.append(_digest(line.id))
        if num_prompts == 0:
            place, number = at, line_number
        num_prompts, num_samples = num_prompts + 1, num_samples + line.params.n
        if num_samples >= shard_size:
            shards.append(Shard(place, number, first, num_prompts, num_samples))
            first, num_prompts, num_samples = first + num_prompts, 0, 0
    if num_prompts:
        shards.append(Shard(place, number, first, num_prompts, num_samples))
    _refuse_twins(path, params, digests, bad)
    bad.raise_any()
    if not shards:
        raise InvalidRequest(f"prompts={os.fspath(path)!r}, expected at least one line with a prompt")
    if file_sha256(path) != before:
        raise InvalidRequest(f"prompts={os.fspath(path)!r}, expected a file that stays as it is; it changed meanwhile")
    return PromptScan(before, shards)


class PromptReader:
    """Reads the shards of a scanned file, cheapest in their order.

    Args:
        path, params: As they were scanned.
    """

    def __init__(self, path: str | os.PathLike[str], params: SamplingParams) -> None:
        self._path, self._params = Path(path), params
        self._contents: Iterator[tuple[int, int, bytes | dict[str, Any]]] = iter(())
        self._place = -1

    def read(self, shard: Shard) -> list[PromptLine]:
        """The prompts of one shard.

        Raises:
            InvalidRequest: The file isn't the one that was scanned.
            OSError: It can't be read.
        """
        # Within a row group there is no way but to read on; to a line of text there is.
        if not (self._path.suffix == ".parquet" and 0 <= self._place <= shard.place):
            self._contents = _contents(self._path, shard.place, shard.number)
        lines: list[PromptLine] = []
        for place, number, content in self._contents:
            if place >= shard.place:
                lines.append(_line(number, content, self._params))
                if len(lines) == shard.num_prompts:
                    self._place = place + 1
                    return lines
        raise InvalidRequest(
            f"prompts={os.fspath(self._path)!r}, expected {shard.num_prompts - len(lines)} more prompts; it was cut "
            "while in use"
        )


def file_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, as hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _contents(path: Path, place: int, number: int) -> Iterator[tuple[int, int, bytes | dict[str, Any]]]:
    """(place, number, content) of all prompts from a place on: a line's bytes, or a row's values."""
    if path.suffix == ".parquet":
        yield from _rows(path, place)
        return
    with path.open("rb") as file:
        file.seek(place)
        while line := file.readline(LONGEST_LINE + 1):
            start, place = place, place + len(line)
            if len(line) > LONGEST_LINE:
                while rest := file.readline(LONGEST_LINE):
                    place += len(rest)
                    if rest.endswith(b"\n"):
                        break
            if line.strip():
                yield start, number, line
            number += 1


def _rows(path: Path, place: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if foreign := [name for name in names if name not in (*KINDS, "params", "id")]:
                raise InvalidRequest(
                    f"{os.fspath(path)}: columns {foreign}, expected only {', '.join(KINDS)}, params, id"
                )
            row, groups = 0, list[int]()
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if groups or row + rows > place:
                    groups.append(group)
                else:
                    row += rows
            for batch in file.iter_batches(_ROWS, row_groups=groups):
                passed = min(max(place - row, 0), len(batch))
                for at, held in enumerate(batch.slice(passed).to_pylist(), row + passed):
                    yield at, at + 1, _as_json(held)
                row += len(batch)
    except pa.ArrowException as error:
        raise InvalidRequest(f"{os.fspath(path)}: expected a Parquet file: {error}") from None


class _BadLines:
    """The first bad lines of a file, and how many there are."""

    def __init__(self, path: Path) -> None:
        self._path, self._first, self._count = path, list[tuple[int, str]](), 0

    def add(self, number: int, message: str) -> None:
        self._count += 1
        self._first.append((number, message))
        if len(self._first) > 2 * MOST_SHOWN:
            self._first = sorted(self._first)[:MOST_SHOWN]

    def raise_any(self) -> None:
        if not self._count:
            return
        shown = [f"{os.fspath(self._path)}, line {number}: {text}" for number, text in sorted(self._first)[:MOST_SHOWN]]
        more = [f"and {self._count - MOST_SHOWN} more bad lines"] if self._count > MOST_SHOWN else []
        raise InvalidRequest("\n".join([*shown, *more]))


def _refuse_twins(path: Path, params: SamplingParams, digests: array[int], bad: _BadLines) -> None:
    """Name the lines whose id an earlier one has; the file is read again only if there may be some."""
    values, counts = np.unique(np.frombuffer(digests, np.uint64), return_counts=True)
    twins = set(values[counts > 1].tolist())
    if not twins:
        return
    seen: dict[str, int] = {}
    for _, number, content in _contents(path, 0, 1):
        try:
            name = _line(number, content, params).id
        except InvalidRequest:
            continue
        if name is not None and _digest(name) in twins and seen.setdefault(name, number) != number:
            bad.add(number, f"id={name!r}, expected one that line {seen[name]} hasn't")


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def _line(number: int, content: bytes | dict[str, Any], params: SamplingParams) -> PromptLine:
    held = content if isinstance(content, dict) else _json_line(content)
    for name in held:
        if name not in (*KINDS, "params", "id"):
            raise InvalidRequest(f"{name}={short(held[name])}, expected one of {', '.join(KINDS)}, params, id")
    kinds = [kind for kind in KINDS if kind in held]
    if len(kinds) != 1:
        raise InvalidRequest(f"{' and '.join(kinds) or 'no prompt'}, expected exactly one of {', '.join(KINDS)}")
    own = held.get("params")
    if isinstance(content, dict) and isinstance(own, str):
        own = _json_line(own.encode("utf-8", "replace"))
    return PromptLine(number, _prompt(kinds[0], held[kinds[0]]), _params(own, params), _id(held))


def _json_line(content: bytes) -> dict[str, Any]:
    if len(content) > LONGEST_LINE:
        raise InvalidRequest(f"{short(content[:100])}, expected at most {LONGEST_LINE} bytes a line")
    try:
        held = json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise InvalidRequest(f"{short(content)}, expected a JSON object: {error}") from None
    if not isinstance(held, dict):
        raise InvalidRequest(f"{short(held)}, expected a JSON object")
    return held


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """A Parquet row as a line of JSON would have it: a struct there has null for whatever it hasn't."""
    held = _without_nulls(row)
    if isinstance(held.get("messages"), list):
        held["messages"] = [_without_nulls(one) for one in held["messages"]]
    own = held.get("params")
    if own is not None:
        held["params"] = _without_nulls(own)
    return held


def _without_nulls(held: Any) -> Any:
    return {name: value for name, value in held.items() if value is not None} if isinstance(held, dict) else held


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
