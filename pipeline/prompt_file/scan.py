"""A whole prompts file, checked and divided into shards."""

from __future__ import annotations

import hashlib
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from model_loaders.files import sha256_of
from pipeline.errors import InvalidRequest
from pipeline.grammars.compiler import check_grammar
from pipeline.grammars.grammar import Grammar
from pipeline.policy.params import SamplingParams
from pipeline.policy.reasons import kind_of
from pipeline.prompt_file.contents import contents
from pipeline.prompt_file.line import prompt_line

MOST_SHOWN = 20
"""Kinds of bad lines that an error names, and the most lines of a kind."""


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
        InvalidRequest: Lines that are no prompts or whose grammar doesn't compile, by number, those for one reason
            together; no prompt at all; common parameters with such a grammar.
        OSError: The file can't be read.
    """
    path, bad, digests = Path(path), _BadLines(path), array("Q")
    shards: list[Shard] = []
    place = number = first = num_prompts = num_samples = 0
    if params.grammar is not None:  # once, not for every line
        check_grammar(Grammar.of(params.grammar))
    before = sha256_of(path)
    for at, line_number, content in contents(path, 0, 1):
        try:
            line = prompt_line(line_number, content, params)
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
    if sha256_of(path) != before:
        raise InvalidRequest(f"prompts={os.fspath(path)!r}, expected a file that stays as it is; it changed meanwhile")
    return PromptScan(before, shards)


@dataclass
class _Kind:
    """Bad lines of one kind: what the first one's message is, the first lines' numbers, and how many there are."""

    message: str
    numbers: list[int] = field(default_factory=list)
    count: int = 0


class _BadLines:
    """The bad lines of a file by their kind (`pipeline.policy.reasons`); they are added in order."""

    def __init__(self, path: Path) -> None:
        self._path, self._kinds, self._others = path, dict[str, _Kind](), 0

    def add(self, number: int, message: str) -> None:
        name = kind_of(message)
        if name not in self._kinds and len(self._kinds) >= MOST_SHOWN:
            self._others += 1
            return
        kind = self._kinds.setdefault(name, _Kind(message))
        kind.count += 1
        if len(kind.numbers) < MOST_SHOWN:
            kind.numbers.append(number)

    def raise_any(self) -> None:
        if not self._kinds:
            return
        shown = [self._line(kind) for kind in sorted(self._kinds.values(), key=lambda kind: kind.numbers[0])]
        more = [f"and {self._others} more bad lines"] if self._others else []
        raise InvalidRequest("\n".join([*shown, *more]))

    def _line(self, kind: _Kind) -> str:
        first, *others = kind.numbers
        text = f"{os.fspath(self._path)}, line {first}: {kind.message}"
        if not others:
            return text
        numbers = ", ".join([*map(str, others), *["..."] * (kind.count > len(kind.numbers))])
        return f"{text}; and {kind.count - 1} more such lines: {numbers}"


def _refuse_twins(path: Path, params: SamplingParams, digests: array[int], bad: _BadLines) -> None:
    """Name the lines whose id an earlier one has; the file is read again only if there may be some."""
    values, counts = np.unique(np.frombuffer(digests, np.uint64), return_counts=True)
    twins = set(values[counts > 1].tolist())
    if not twins:
        return
    seen: dict[str, int] = {}
    for _, number, content in contents(path, 0, 1):
        try:
            name = prompt_line(number, content, params).id
        except InvalidRequest:
            continue
        if name is not None and _digest(name) in twins and seen.setdefault(name, number) != number:
            bad.add(number, f"id={name!r}, expected one that line {seen[name]} hasn't")


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
