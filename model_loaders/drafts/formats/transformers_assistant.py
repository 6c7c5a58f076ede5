"""transformers' own DFlash assistants (``generate(assistant_model=...)``): refused by name.

The one architecture that transformers has (5.24: muse_glimmer_assistant) belongs to a target with sliding windows,
whose cache can't be kept by row, and embeds its blocks without that target's embedding norm.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

from model_loaders.drafts.formats.values import Values

SUFFIX = "_assistant"
NESTED = ()


def read(values: Values, names: Collection[str], target: Any) -> NoReturn:
    """Raises CheckpointError."""
    raise values.error(
        f"model_type={values.raw.get('model_type')!r} is transformers' own assistant format, expected a draft of "
        "z-lab, DeepSpec, SpecForge or speculators: its target can't be served by row; use transformers' generate "
        "with it"
    )
