"""Targets, drafts, their checkpoint formats and the key-value cache with rows of their own lengths."""

from model_loaders.drafts import FoundDraft, find_draft, load_draft, save_draft
from model_loaders.errors import CheckpointError
from model_loaders.kv_cache import RowCache
from model_loaders.targets import Target, load_target, tiny_target

__all__ = [
    "CheckpointError",
    "FoundDraft",
    "RowCache",
    "Target",
    "find_draft",
    "load_draft",
    "load_target",
    "save_draft",
    "tiny_target",
]
