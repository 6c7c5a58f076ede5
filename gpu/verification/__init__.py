"""Chain verification: which drafts are kept, and the token that follows them."""

from gpu.verification.record import Verdict
from gpu.verification.verify import verify_chain

__all__ = ["Verdict", "verify_chain"]
