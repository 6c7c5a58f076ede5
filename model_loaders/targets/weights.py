"""A target's weights as a whole: their hash, and new values for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from model_loaders.errors import CheckpointError
from model_loaders.files import sha256_of


def sha256_of_all(files: Sequence[Path]) -> str | None:
    """SHA-256 of weight files, as hex: one file's own; of several, of `sha256sum`'s listing of them, sorted by name.

    None without files.
    """
    hashes = {path.name: sha256_of(path) for path in files}
    if len(hashes) <= 1:
        return next(iter(hashes.values()), None)
    listing = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))
    return hashlib.sha256(listing.encode()).hexdigest()


@torch.no_grad()
def copy_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies new values into a model's weights, in place; names are its state_dict's keys.

    All names, shapes and dtypes are checked first, so a refused call changes nothing. Raises CheckpointError naming the
    key.
    """
    own = model.state_dict()
    for key, value in tensors.items():
        if key not in own:
            raise CheckpointError(f"{key}: unexpected tensor, expected one of the target's {len(own)} keys")
        if own[key].shape != value.shape:
            raise CheckpointError(f"{key}: shape {list(value.shape)}, expected {list(own[key].shape)}")
        if not value.is_floating_point():
            raise CheckpointError(f"{key}: dtype {value.dtype}, expected a floating one")
    for key, value in tensors.items():
        own[key].copy_(value)
