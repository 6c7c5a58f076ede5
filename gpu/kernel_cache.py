"""Stale kernels are dropped on import.

Numba caches compiled kernels, but looks at the kernel's own file only: a change in a helper's file would go
unnoticed. So compiled kernels older than any file of this package are removed before they can be loaded.
"""

import contextlib
from pathlib import Path


def drop_stale(folder: Path) -> None:
    """Remove cache indexes under `folder` that are older than the newest source there."""
    newest = max(source.stat().st_mtime for source in folder.rglob("*.py"))
    for index in folder.rglob("__pycache__/*.nbi"):
        with contextlib.suppress(OSError):
            if index.stat().st_mtime < newest:
                index.unlink()


drop_stale(Path(__file__).parent)
