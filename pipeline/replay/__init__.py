"""The trainer's side: the recorded policy replayed from the trainer's own logits.

    recorded    what a trainer needs of many rollouts, their tokens side by side
    sequences   the batch to run through the trained model, and where its logits of every token are
    supports    log-probabilities and entropy over the recorded supports, differentiable; `Supports` is prepared once
    entries     gpu.replay's kernels as torch's operations, on the host and on CUDA
    ratios      importance ratios against the recorded log-probabilities

With z the trainer's logits after the rollout's own adjustments (penalties, bias), T the rollout's temperature and S the
recorded support, the log-probability of a token y is z_y / T - logsumexp over v in S of z_v / T ("keep sampling mask",
DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
"""

from pipeline.replay.ratios import ImportanceRatios, importance_ratios
from pipeline.replay.recorded import Recorded
from pipeline.replay.sequences import Sequences
from pipeline.replay.supports import Replayed, Supports, replay, support_entropy, support_logprobs

__all__ = [
    "ImportanceRatios",
    "Recorded",
    "Replayed",
    "Sequences",
    "Supports",
    "importance_ratios",
    "replay",
    "support_entropy",
    "support_logprobs",
]
