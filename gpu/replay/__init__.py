"""Replay: the log-softmax of a trainer's logits over recorded supports, and its gradient."""

from gpu.replay.log_softmax import support_log_softmax, support_log_softmax_backward

__all__ = ["support_log_softmax", "support_log_softmax_backward"]
