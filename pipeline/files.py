"""Files that appear under their name whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"
"""How the name of a file ends while it is being written; it begins with a dot and the name that it will have."""


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when the block ends, and is gone when the block raises.

    It is written beside `path`, flushed to the disk and renamed; then the folder is flushed too. Killed at any
    instant, a process leaves what stood under the name before or all of the new content, and perhaps the temporary
    file.

    Raises:
        OSError: It can't be written; what stood under the name is untouched.
    """
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: str | os.PathLike[str]) -> None:
    """Flush a folder's names to the disk, so that a rename outlives the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
