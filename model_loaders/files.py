"""What every loader reads files with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from model_loaders.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError for an unreadable file or another kind of value."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON in UTF-8 ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {shown(value)}, expected a JSON object; fetch the file again")
    return value


def shown(value: Any) -> str:
    """The value's repr, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
