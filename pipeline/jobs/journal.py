"""The journal of a job: a line of JSON for every shard that is finished."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from model_loaders.files import sha256_of
from pipeline.files import flush_folder
from pipeline.jobs.folder import JobFolder, regular_size
from pipeline.results.summary import Summary

_KINDS: dict[str, Any] = {
    "shard": int,
    "file": str,
    "size": int,
    "sha256": str,
    "worker": str,
    "started": float,
    "seconds": float,
}


@dataclass(frozen=True)
class Entry:
    """A finished shard.

    Attributes:
        shard: Its index.
        file: The name of its file in the job's folder, for a reader: the job makes the name itself.
        size: Bytes of its file.
        sha256: Of its file.
        summary: `Summary.to_dict` of its rollouts.
        worker: Who made it: host and process.
        started, seconds: When, in Unix time, and how long it took.
    """

    shard: int
    file: str
    size: int
    sha256: str
    summary: dict[str, Any]
    worker: str
    started: float
    seconds: float

    def line(self) -> str:
        """As the journal holds it."""
        return json.dumps(vars(self)) + "\n"

    @classmethod
    def read(cls, line: bytes | str) -> Entry | None:
        """The entry of a line; None if a kill, or anybody, left something else there."""
        try:
            held = json.loads(line)
            entry = cls(summary=held["summary"], **{name: kind(held[name]) for name, kind in _KINDS.items()})
            Summary.from_dict(entry.summary)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None
        return entry


class Journal:
    """Appends entries, each flushed to the disk before `append` returns, and reads them.

    Args:
        folder: The job's, held by this process if anything is to be appended.
    """

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    def entries(self, num_shards: int) -> Iterator[Entry]:
        """The entries, one a shard, of the shards whose files are there and whole."""
        found: set[int] = set()
        try:
            file = self._folder.journal.open("rb")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                entry = Entry.read(line) if line.endswith(b"\n") else None
                if entry is None or entry.shard in found or not 0 <= entry.shard < num_shards:
                    continue
                if is_whole(self._folder.shard(entry.shard), entry):
                    found.add(entry.shard)
                    yield entry

    def append(self, entry: Entry) -> None:
        """Write a line and flush it; what a write left half done is taken back first, then and now.

        Raises:
            OSError: The disk is full, or the file can't be written.
        """
        path = self._folder.journal
        existed = path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "r+b") as file:
            end = _end_of_last_line(file)
            file.truncate(end)
            file.seek(end)
            try:
                file.write(entry.line().encode())
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                os.truncate(path, end)
                raise
        if not existed:
            flush_folder(path.parent)


def is_whole(path: Path, entry: Entry) -> bool:
    """Whether a shard's file has the size, the content and the rows that the journal says."""
    if regular_size(path) != entry.size:
        return False
    try:
        return (
            sha256_of(path) == entry.sha256
            and pq.read_metadata(path).num_rows == Summary.from_dict(entry.summary).num_rollouts
        )
    except (pa.ArrowException, OSError):
        return False


def _end_of_last_line(file: Any) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
