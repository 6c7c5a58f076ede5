"""The lines of a JSONL file and the rows of a Parquet file, from any place on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import InvalidRequest, short

KINDS = ("prompt", "messages", "token_ids")
"""A prompt is under one of these names."""
FIELDS = (*KINDS, "params", "id")
LONGEST_LINE = 1 << 26
"""Bytes of a line of JSON; a longer one is refused instead of held."""
_ROWS = 256


def contents(path: Path, place: int, number: int) -> Iterator[tuple[int, int, bytes | dict[str, Any]]]:
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
        # Read ahead, all of the groups asked for would be in memory.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if foreign := [name for name in names if name not in FIELDS]:
                raise InvalidRequest(f"{os.fspath(path)}: columns {foreign}, expected only {', '.join(FIELDS)}")
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


def json_object(content: bytes) -> dict[str, Any]:
    """The object in a line, or a value, of JSON in UTF-8. Raises InvalidRequest."""
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
