"""Replay: the log-softmax of a trainer's logits over recorded supports, and its gradient."""

from gpu.replay.log_softmax import row_sums, support_log_softmax, support_log_softmax_backward

__all__ = ["row_sums", "support_log_softmax", "support_log_softmax_backward"]
