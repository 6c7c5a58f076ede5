"""Failures that fuzzing found, kept: a file for each in ``tests/cases/``, and every run of the tests goes through them.

A check is a function of a backend and arguments that one file can hold. When a fuzzed one fails, `keeps_failures`
writes the arguments that failed last, which are Hypothesis's smallest; commit the file with the fix.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.strategies import Rows

FOLDER = Path(__file__).parent / "cases"
CHECKS: dict[str, Callable[..., None]] = {}
_RECORDS = {"Rows": Rows}
_written: dict[str, Path] = {}


def keeps_failures(check: Callable[..., None]) -> Callable[..., None]:
    """A check whose failures are written to `FOLDER`; it is called with a backend and keywords."""
    name = check.__name__.removeprefix("check_")

    @functools.wraps(check)
    def checked(backend: Any, **arguments: Any) -> None:
        try:
            check(backend, **arguments)
        except Exception:
            save(name, arguments)
            raise

    CHECKS[name] = check
    return checked


def save(name: str, arguments: dict[str, Any], folder: Path | None = None) -> Path:
    """Write the arguments of a check, in place of those that this process wrote for it before."""
    arrays: dict[str, np.ndarray] = {}
    held = json.dumps({"check": name, "arguments": _pack(arguments, arrays)})
    content = hashlib.sha256(held.encode() + b"".join(arrays[key].tobytes() for key in sorted(arrays)))
    path = (folder or FOLDER) / f"{name}-{content.hexdigest()[:12]}.npz"
    path.parent.mkdir(exist_ok=True)
    if path != (before := _written.get(name)):
        if before is not None:
            before.unlink(missing_ok=True)
        if not path.exists():
            np.savez_compressed(path, held=np.frombuffer(held.encode(), np.uint8), **arrays)
            _written[name] = path
    return path


def load(path: Path) -> tuple[Callable[..., None], dict[str, Any]]:
    """A check and the arguments of a file."""
    with np.load(path, allow_pickle=False) as file:
        held = json.loads(file["held"].tobytes())
        return CHECKS[held["check"]], _unpack(held["arguments"], file)


def _pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if dataclasses.is_dataclass(value):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return {"record": type(value).__name__, "fields": _pack(fields, arrays)}
    if isinstance(value, dict):
        return {"dict": {key: _pack(one, arrays) for key, one in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_pack(one, arrays) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def _unpack(held: Any, file: Any) -> Any:
    if isinstance(held, list):
        return [_unpack(one, file) for one in held]
    if not isinstance(held, dict):
        return held
    if "array" in held:
        return file[held["array"]]
    if "dict" in held:
        return {key: _unpack(one, file) for key, one in held["dict"].items()}
    return _RECORDS[held["record"]](**_unpack(held["fields"], file))
