"""The prompts of a scanned file, a shard at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import InvalidRequest
from pipeline.policy.params import SamplingParams
from pipeline.prompt_file.contents import contents
from pipeline.prompt_file.line import PromptLine, prompt_line
from pipeline.prompt_file.scan import Shard


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
            self._contents = contents(self._path, shard.place, shard.number)
        lines: list[PromptLine] = []
        for place, number, content in self._contents:
            if place >= shard.place:
                lines.append(prompt_line(number, content, self._params))
                if len(lines) == shard.num_prompts:
                    self._place = place + 1
                    return lines
        raise InvalidRequest(
            f"prompts={os.fspath(self._path)!r}, expected {shard.num_prompts - len(lines)} more prompts; it was cut "
            "while in use"
        )
