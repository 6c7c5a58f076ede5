"""What a pipeline's `draft` may be."""

from __future__ import annotations

import os
from typing import Any, TypeGuard

from pipeline.errors import InvalidRequest, short

LOOKUP = "ngram"
"""The name of prompt lookup, the one method with a name that has no checkpoint."""


def is_named(draft: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Whether it is the name or the folder of a draft that is yet to be made."""
    return isinstance(draft, (str, os.PathLike))


def check_draft(draft: Any) -> None:
    """Hold what isn't a name against what a draft must be.

    Raises:
        InvalidRequest: It is neither None nor something that proposes.
    """
    if draft is None or (hasattr(draft, "propose") and not isinstance(draft, type)):
        return
    raise InvalidRequest(
        f"draft={short(draft)}, expected None (ordinary decoding), a Proposer (an instance) or what load_draft gives; "
        f'SpeculativePipeline.from_pretrained also takes "demo", "demo-dspark", "{LOOKUP}", a hub name or a folder'
    )
