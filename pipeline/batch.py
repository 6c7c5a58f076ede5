"""Many prompts through a pipeline, and their rollouts to Parquet files as they finish."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import InvalidRequest
from pipeline.params import SamplingParams
from pipeline.pipeline import SpeculativePipeline
from pipeline.prompt_file import PromptLine
from pipeline.provenance import describe
from pipeline.rollout import Rollout
from pipeline.rollouts import Rollouts


@dataclass
class _Open:
    index: int
    line: PromptLine
    rollouts: list[Rollout]


def run(pipe: SpeculativePipeline, lines: Sequence[PromptLine]) -> Iterator[tuple[PromptLine, list[Rollout]]]:
    """Generate for all lines; yields a line with its `n` rollouts when the last of them is finished.

    Requests are queued a batch ahead, so slots are refilled while a long output runs on. A rollout's `prompt_index` is
    the line's place in `lines`, its `prompt_id` the line's id; `params_index` is 0. A refused request comes out with
    `error` set. Ending the iteration early takes what is open out of the pipeline.

    Raises:
        InvalidRequest: The pipeline has other work.
    """
    if pipe.has_work:
        raise InvalidRequest("pipe.has_work=True, expected an idle pipeline: finish what was submitted first")
    left = iter(enumerate(lines))
    following = next(left, None)
    running: dict[int, _Open] = {}
    try:
        while following is not None or running:
            while following is not None and len(pipe.state.waiting) < pipe.state.options.max_batch:
                index, line = following
                following = next(left, None)
                try:
                    running[pipe.submit(line.prompt, line.params)] = _Open(index, line, [])
                except InvalidRequest as refusal:
                    refused = Rollout.refused(str(refusal), index, line.params.n, 0)
                    yield line, [replace(rollout, prompt_id=line.id) for rollout in refused]
            if not running:
                continue
            for rollout in pipe.step().rollouts:
                ticket = rollout.prompt_index
                if ticket in running:
                    one = running[ticket]
                    one.rollouts.append(replace(rollout, prompt_index=one.index, prompt_id=one.line.id))
                    if len(one.rollouts) == one.line.params.n:
                        del running[ticket]
                        yield one.line, sorted(one.rollouts, key=lambda r: r.sample_index)
    finally:
        pipe.state.abandon(running)


class ShardWriter:
    """Writes rollouts to ``rollouts-00000.parquet``, ``rollouts-00001.parquet``, ... in a folder.

    A file holds whole prompts in the order of the prompts file, as far as they finished in time for it; it appears
    under its name complete or not at all.

    Args:
        folder: It must be empty or not exist.
        pipe: What generates: its models and options go into every file's metadata.
        size: Rollouts a file, at least; the samples of a prompt aren't parted.
        provenance: More for the metadata.

    Attributes:
        paths: The files written.
    """

    def __init__(
        self, folder: str | os.PathLike[str], pipe: SpeculativePipeline, size: int, provenance: dict[str, Any]
    ) -> None:
        self.folder, self.paths = new_folder(folder), list[Path]()
        self._pipe, self._size, self._provenance = pipe, size, provenance
        self._held: list[tuple[SamplingParams, Rollout]] = []

    def add(self, line: PromptLine, rollouts: Sequence[Rollout]) -> None:
        """Take a prompt's rollouts, and write a file if there are enough."""
        self._held += [(line.params, rollout) for rollout in rollouts]
        if len(self._held) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if not self._held:
            return
        self._held.sort(key=lambda held: (held[1].prompt_index, held[1].sample_index))
        numbers: dict[SamplingParams, int] = {}
        rollouts = [
            replace(rollout, params_index=numbers.setdefault(params, len(numbers))) for params, rollout in self._held
        ]
        provenance = describe(self._pipe.state, self._pipe.capabilities, list(numbers)) | self._provenance
        path = self.folder / f"rollouts-{len(self.paths):05d}.parquet"
        self.paths.append(Rollouts(rollouts, provenance).to_parquet(path))
        self._held.clear()


def new_folder(folder: str | os.PathLike[str]) -> Path:
    """Make an empty folder, or take one that is.

    Raises:
        InvalidRequest: It holds something.
        OSError: It can't be made.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InvalidRequest(f"out={os.fspath(folder)!r}, expected an empty folder, or a name for a new one")
    return folder
