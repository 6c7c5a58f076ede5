"""What a pipeline's `draft` may be."""

from __future__ import annotations

import os
from typing import Any

from model_loaders import find_draft
from model_loaders.drafts.finding import demo_names
from pipeline.drafting.ngram import NgramProposer
from pipeline.errors import InvalidRequest, short

LOOKUP = "ngram"
"""The name of prompt lookup, the one method with a name that has no checkpoint."""


def named_draft(draft: Any) -> Any:
    """What a draft's name, or its folder, stands for before there is a target: `FoundDraft`, or a proposer.

    Returns:
        Whatever isn't a name is itself.

    Raises:
        model_loaders.CheckpointError: A checkpoint that isn't there, or is no draft's.
        InvalidRequest: Neither a name nor a draft.
    """
    if isinstance(draft, (str, os.PathLike)):
        return NgramProposer() if draft == LOOKUP else find_draft(os.fspath(draft))
    check_draft(draft)
    return draft


def check_draft(draft: Any) -> None:
    """Hold what isn't a name against what a draft must be.

    Raises:
        InvalidRequest: It is neither None nor something that proposes.
    """
    if draft is None or (hasattr(draft, "propose") and not isinstance(draft, type)):
        return
    raise InvalidRequest(
        f"draft={short(draft)}, expected None (ordinary decoding), a Proposer (an instance) or what load_draft gives; "
        f"SpeculativePipeline.from_pretrained also takes {demo_names()}, '{LOOKUP}', a hub name or a folder"
    )
