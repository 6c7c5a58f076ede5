"""Which published layout a draft's config.json is in."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from model_loaders.drafts.formats import deepspec, specforge, speculators, transformers_assistant, zlab
from model_loaders.errors import CheckpointError

BY_ARCHITECTURE: dict[str, ModuleType] = {
    zlab.DFLASH: zlab,
    zlab.DFLASH2: zlab,
    deepspec.DSPARK: deepspec,
    specforge.DSPARK: specforge,
}
REFUSED = {"Gemma4DSparkModel": "Gemma 4's layers (two head sizes, four norms, scaled embeddings) aren't implemented"}


def detect(raw: dict[str, Any], path: Path) -> ModuleType:
    """The module of `formats` that reads this configuration. Raises CheckpointError for an unknown one."""
    if "speculators_model_type" in raw or "speculators_config" in raw:
        return speculators
    if str(raw.get("model_type")).endswith(transformers_assistant.SUFFIX):
        return transformers_assistant
    named = raw.get("architectures") or [zlab.DFLASH]
    only = named[0] if isinstance(named, list) and len(named) == 1 else None
    if only in REFUSED:
        raise CheckpointError(f"{path}: architectures={named!r} is refused: {REFUSED[only]}")
    if only not in BY_ARCHITECTURE:
        raise CheckpointError(
            f"{path}: architectures={named!r}, expected one of {', '.join(BY_ARCHITECTURE)}, or a "
            "speculators_model_type"
        )
    return BY_ARCHITECTURE[only]
