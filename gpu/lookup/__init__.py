"""Drafts looked up in the tokens that a request already has."""

from gpu.lookup.lookup import prompt_lookup

__all__ = ["prompt_lookup"]
