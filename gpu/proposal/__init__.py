"""Drafts drawn from a draft's logits, and the laws that they were drawn from."""

from gpu.proposal.draw import draw_drafts
from gpu.proposal.laws import dense_law
from gpu.proposal.record import Drawn, LogitsLaw

__all__ = ["Drawn", "LogitsLaw", "dense_law", "draw_drafts"]
