"""Stale kernels are dropped on import.

Numba caches compiled kernels, but looks at the kernel's own file only: a change in a helper's file would go
unnoticed. So compiled kernels older than any file of this package are removed before they can be loaded.
"""

import contextlib
from pathlib import Path


def drop_stale(folder: Path) -> None:
    """Remove cache indexes in folder/__pycache__ that are older than the newest source in `folder`."""
    newest = max(source.stat().st_mtime for source in folder.glob("*.py"))
    for index in (folder / "__pycache__").glob("*.nbi"):
        with contextlib.suppress(OSError):
            if index.stat().st_mtime < newest:
                index.unlink()


drop_stale(Path(__file__).parent)
