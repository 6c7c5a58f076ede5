"""The files of a job's folder. Their names are made here and never taken from a file."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import InvalidRequest
from pipeline.files import TEMPORARY

MANIFEST, JOURNAL, LOCK = "manifest.json", "journal.jsonl", ".lock"
_OWN = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(JOURNAL)}|{re.escape(LOCK)}|rollouts-\d{{5,}}\.parquet"
    rf"|\.({re.escape(MANIFEST)}|rollouts-\d{{5,}}\.parquet)\.\w+{re.escape(TEMPORARY)}"
)


class JobFolder:
    """A folder that holds one job and nothing else.

    Args:
        path: It may not exist yet.

    Raises:
        InvalidRequest: It holds something else.
        OSError: It can't be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: BinaryIO | None = None
        if self.path.exists():
            foreign = sorted(found.name for found in self.path.iterdir() if not _OWN.fullmatch(found.name))
            if foreign:
                raise InvalidRequest(
                    f"out={os.fspath(path)!r}, expected an empty folder, a name for a new one, or a job's: it holds "
                    f"{', '.join(foreign[:3])}"
                )

    @property
    def manifest(self) -> Path:
        """Where the manifest is, or will be."""
        return self.path / MANIFEST

    @property
    def journal(self) -> Path:
        """Where the journal is, or will be."""
        return self.path / JOURNAL

    def shard(self, index: int) -> Path:
        """Where the rollouts of a shard are, or will be."""
        return self.path / f"rollouts-{index:05d}.parquet"

    def lock(self) -> None:
        """Make the folder, hold it for this process until `release` or its end, and clear what a kill left.

        Raises:
            InvalidRequest: Another process holds it.
            OSError: It can't be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        lock = os.fdopen(descriptor, "r+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise InvalidRequest(
                f"out={os.fspath(self.path)!r}, expected a job that nobody else runs: another process is at it"
            ) from None
        self._lock = lock
        for left in self.path.glob(f".*{TEMPORARY}"):
            left.unlink()

    def check_new(self) -> None:
        """Hold a folder without a manifest against holding what only a manifest explains.

        Raises:
            InvalidRequest: It has a journal or shards: of which prompts and parameters, nobody knows.
        """
        left = sorted(path.name for path in [*self.path.glob("rollouts-*.parquet"), *self.path.glob(JOURNAL)])
        if left:
            raise InvalidRequest(
                f"out={os.fspath(self.path)!r}, expected {MANIFEST} beside {', '.join(left[:3])}: put it back, or "
                "begin in another folder"
            )

    def release(self) -> None:
        """Let others have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def regular_size(path: Path) -> int | None:
    """Bytes of a file; None where there is none, or a link or anything else in its place."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
