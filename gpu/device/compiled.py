"""Kernels compiled once a machine instead of once a process, which costs ten to twenty seconds of processor time.

Numba keeps CUDA kernels too, but tells those of one function apart by a pickle of what they close over, which differs
in every process, and lets processes that start side by side write to one index. Here a kernel is a file of its own,
named by all that it is made of: the sources of this package, what the function closes over, the signature, the versions
and the device. A file that can't be read or written costs a compilation, nothing else.

The files are in $SPECMASK_CACHE/kernels, else $XDG_CACHE_HOME/specmask/kernels, else ~/.cache/specmask/kernels, and are
code like the __pycache__ folders of a user: whoever may write there may run code as that user.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import types as python
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import cuda

ROOT = Path(__file__).parent.parent
KEPT_VERSIONS = 4
"""Folders that are kept: one for each state of the sources, the last made ones."""

_PLAIN = bool, int, float, str, bytes, type(None), np.generic


def compiled(function: Callable, signature: Any, max_registers: int | None) -> Any:
    """The kernel, ready to be configured and launched: from its file, or compiled and written to it."""
    dispatcher = cuda.jit(max_registers=max_registers)(function)
    dispatcher._cache = _file(identity(function, signature, max_registers))
    dispatcher.compile(signature.args)
    # As `cuda.jit` leaves a kernel that it is given the signature of.
    dispatcher._specialized = True
    dispatcher.disable_compile()
    return dispatcher


def identity(function: Callable, signature: Any, max_registers: int | None) -> str:
    """What a kernel is made of, the same in every process, but for sources, versions and device."""
    return f"{_described(function, {})} {signature} {max_registers}"


def folder() -> Path:
    """Where the kernels of these sources are kept; it need not exist."""
    if own := os.environ.get("SPECMASK_CACHE"):
        base = Path(own).expanduser()
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        base = Path(xdg).expanduser() / "specmask"
    else:
        base = Path.home() / ".cache" / "specmask"
    return base / "kernels" / _sources()


@cache
def _sources() -> str:
    """Of the package's files: helpers and constants that a kernel uses may be in any of them."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _described(value: Any, known: dict[int, str]) -> str:
    """A constant, or a function with all that it closes over."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple):
        return f"({', '.join(_described(one, known) for one in value)})"
    function = getattr(value, "py_func", getattr(value, "_defn", value))  # of a device function, of an intrinsic
    if not isinstance(function, python.FunctionType):
        raise TypeError(f"value={value!r}, expected a constant or a function: a kernel can't be known by it")
    if id(function) not in known:
        cells = [_described(cell.cell_contents, known) for cell in function.__closure__ or ()]
        text = f"{function.__module__}.{function.__qualname__}({', '.join(cells)})"
        known[id(function)] = text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()
    return known[id(function)]


def _file(described: str) -> Any:
    """A `_KernelFile`. Numba's CUDA dispatcher isn't there where it is simulated."""
    from numba.cuda.dispatcher import NullCache, _Kernel
    from numba.cuda.serialize import dumps, loads

    class _KernelFile(NullCache):
        """The cache of one kernel's dispatcher."""

        def _path(self) -> Path:
            version = cuda.current_context().device.compute_capability, cuda.runtime.get_version()
            parts = described, version, *map(importlib.metadata.version, ("numba", "numba-cuda", "numpy"))
            return folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.kernel"

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            """The kernel from its file; None where there is none that can be read."""
            target_context.refresh()
            with contextlib.suppress(Exception):  # whatever is wrong with a file, compiling mends it
                return _Kernel._rebuild(**loads(self._path().read_bytes()))
            return None

        def save_overload(self, sig: Any, data: Any) -> None:
            """Write it, whole or not at all."""
            path = self._path()
            with contextlib.suppress(OSError):  # a read-only or full disk
                _make_folder(path.parent)
                unfinished = path.with_suffix(f".{os.getpid()}")
                try:
                    unfinished.write_bytes(dumps(data._reduce_states()))
                    os.replace(unfinished, path)
                finally:
                    unfinished.unlink(missing_ok=True)

    return _KernelFile()


def _make_folder(own: Path) -> None:
    """Make it, and remove those of sources that have long been others."""
    if own.is_dir():
        return
    own.mkdir(parents=True)
    others = sorted((path for path in own.parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in others[:-KEPT_VERSIONS]:
        shutil.rmtree(path, ignore_errors=True)
