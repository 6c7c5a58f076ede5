"""Score centering: a policy-gradient loss without the drift that a mismatch of the two policies causes.

With tokens from a rollout policy and the score s = grad log of the trainer's policy, the expected update is
E[A s] = E[A] E[s] + Cov(A, s). The first term is drift; score centering subtracts it. For one token y, its recorded
candidates H (the head), an importance-weight function f and a detached advantage A, with sg = no gradient:

    rho   = max(1 - rollout(H), 1e-6) / max(1 - trainer(H), 1e-6)          masses outside the head
    alpha = rho * f(1 / rho)
    loss  = -A * ( sg[f(r_y)] * log trainer_y - sum over v in H of sg[rollout_v * f(r_v) - alpha * trainer_v]
                   * log trainer_v ),                                       r = trainer / rollout
    (arXiv 2609.20807)

    weights   f: none, truncated (TIS), masked (MIS), in forms that exponentiate no unbounded ratio
    heads     H: the complete recorded support, or the recorded top K of an unfiltered policy
    tail      log-probabilities over the whole vocabulary, and the mass outside the head
    loss      the loss and its metrics
"""

from pipeline.centering.loss import CenteredLoss, Metrics, score_centered_loss
from pipeline.centering.weights import MIS, TIS, Unweighted

__all__ = ["MIS", "TIS", "CenteredLoss", "Metrics", "Unweighted", "score_centered_loss"]
