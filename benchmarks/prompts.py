"""Prompts of data sets, for the benchmarks that decode."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from pipeline import SamplingParams
from pipeline.prompt_file import PromptReader, scan_prompts
from pipeline.prompts import Prompted


def first_turns(path: Path, count: int) -> list[Prompted]:
    """The first `count` prompts of a file. ValueError if it has none."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]
    if lines and all(isinstance(one, dict) and one.get("turns") for one in lines):
        return [[{"role": "user", "content": one["turns"][0]}] for one in lines[:count]]
    params = SamplingParams()
    shard = scan_prompts(path, params, count).shards[0]
    return [one.prompt for one in PromptReader(path, params).read(shard)[:count]]


def in_turn(files: Sequence[Path], count: int) -> list[Prompted]:
    """`count` first turns, one of each file in turn, from the beginning again where they are too few."""
    sets = [first_turns(path, -(-count // len(files))) for path in files]
    mixed = [one for row in itertools.zip_longest(*sets) for one in row if one is not None]
    return list(itertools.islice(itertools.cycle(mixed), count))
