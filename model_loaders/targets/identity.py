"""What decides a target's tokens beside its weights, as a hash: configuration, tokenizer, chat template, end ids."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_VOLATILE = {"transformers_version", "dtype", "torch_dtype", "architectures"}
"""Keys of a configuration that loading sets, or that change nothing."""
_STATE = ("truncation", "padding")
"""Parts of a tokenizer that calls leave in it."""


def config_text(config: Any) -> str:
    """A transformers configuration as JSON that doesn't depend on where, when and in which dtype it was loaded."""
    return json.dumps(_steady(config.to_dict()), sort_keys=True, default=str)


def tokenizer_text(tokenizer: Any | None) -> str:
    """A tokenizer as JSON: its whole pipeline where it is one of the tokenizers library, else its vocabulary."""
    if tokenizer is None:
        return "null"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps([type(tokenizer).__qualname__, tokenizer.get_vocab()], sort_keys=True)
    held = json.loads(backend.to_str())
    return json.dumps({name: value for name, value in held.items() if name not in _STATE}, sort_keys=True)


def sha256_of_parts(*parts: Any) -> str:
    """SHA-256, as hex, of what JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _steady(held: Any) -> Any:
    if isinstance(held, dict):
        return {
            str(key): _steady(value)
            for key, value in held.items()
            if key not in _VOLATILE and not str(key).startswith("_")
        }
    return [_steady(value) for value in held] if isinstance(held, (list, tuple)) else held
