"""Verification of chains of drafts: which are kept, and the token that follows them."""

from gpu.verification.record import Verdict
from gpu.verification.verify import accept_purpose, verify_chain

__all__ = ["Verdict", "accept_purpose", "verify_chain"]
