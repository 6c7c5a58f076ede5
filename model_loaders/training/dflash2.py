"""What DFlash 2's selector makes of blocks' hidden states in training, and the loss of its law.

Previous tokens are the text's own. A draft's law Q is the softmax of its candidates' scores (drafts/dflash2.py) at the
text's temperature, zero elsewhere. With P the target's law, C the candidates and U the softmax of all logits without
the selector, the loss is the mean of two (`LossWeights.unary` has the share of the second):

    cross_entropy * -sum_{b in C} P(b) log Q(b)  +  distance * (sum_{b in C} |P(b) - Q(b)| + P(not in C))
    cross_entropy * -sum_b P(b) log U(b)         +  distance * |P - U|_1

Q can't learn a token that isn't a candidate, whose cross-entropy would be infinite: the second loss, which is DFlash's
own, makes it one. Which tokens are candidates has no gradient. The first loss's, stated as in loss.py, with
p = sum_{b in C} P(b) and s = sign(Q - P):

    d/dS = (cross_entropy * (p Q - P) + distance * Q * (s - sum Q s)) / temperature
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model_loaders.drafts.dflash2 import DFlash2Config
from model_loaders.training.loss import Against, Compared, LossWeights, Made

SELECTOR = "candidate_selector."


def before_heads(weights: dict[str, Tensor], hidden: Tensor, previous: Tensor) -> list[Tensor]:
    """Hidden states [b, A, D, d] and the previous tokens' codes times the projected states, [b, A, D, r].

    weights: the module's parameters by name, or copies of them. previous: int64 [b, A, D].
    """
    projected = F.linear(hidden, weights[f"{SELECTOR}hidden_projection.weight"])
    return [hidden, F.embedding(previous, weights[f"{SELECTOR}predecessor_codebook"]) * projected]


def heads(
    config: DFlash2Config, weights: dict[str, Tensor], head: Callable[[Tensor], Tensor], rows: list[Tensor]
) -> Made:
    """Logits [n, V], candidates [n, K] and what is added to theirs, of rows of `before_heads`' tensors."""
    logits = head(rows[0])
    top_k = min(config.selector_top_k, logits.shape[1])
    candidates = logits.detach().topk(top_k, dim=-1, sorted=False).indices
    codes = F.embedding(candidates, weights[f"{SELECTOR}successor_codebook"])  # [n, K, r]
    added = torch.bmm(codes.float(), rows[1].float().unsqueeze(2)).squeeze(2)
    return Made(logits, candidates=candidates, added=added)


def compare_candidates(
    logits: Tensor, target_logits: Tensor, candidates: Tensor, added: Tensor, against: Against, weights: LossWeights
) -> Compared:
    """Drafts' laws over candidates [n, K] beside the target's, of both's logits [n, V]; float32 inside."""
    sampled = against.temperatures > 0
    inverse = torch.where(sampled, 1 / torch.where(sampled, against.temperatures, 1.0), 1.0).unsqueeze(1)
    scores = (logits.gather(1, candidates).float() + added) * inverse
    logs = scores.log_softmax(-1)
    law = logs.exp()
    mass_of_all = (target_logits.float() * inverse).logsumexp(-1, keepdim=True)
    probabilities = (target_logits.gather(1, candidates).float() * inverse - mass_of_all).exp()
    one_hot = (candidates == against.tokens.unsqueeze(1)).float()
    wanted = torch.where(sampled.unsqueeze(1), probabilities, one_hot)
    inside = wanted.sum(-1)
    difference = law - wanted
    distances = difference.abs().sum(-1) + (1 - inside).clamp(min=0)
    sign = difference.sign()
    gradient = weights.cross_entropy * (inside.unsqueeze(1) * law - wanted)
    gradient = gradient + weights.distance * law * (sign - (law * sign).sum(-1, keepdim=True))
    gradient = gradient * (inverse * against.weights.unsqueeze(1))
    losses = weights.cross_entropy * -(wanted * logs).sum(-1) + weights.distance * distances
    best = scores.argmax(-1, keepdim=True)
    guesses, mass = candidates.gather(1, best).squeeze(1), wanted.gather(1, best).squeeze(1)
    return Compared(losses, distances, guesses, mass, gradient)


@functools.cache
def compiled_compare_candidates() -> Callable[..., Compared]:
    """The same in a few fused kernels, with one pass over the target's logits."""
    return torch.compile(compare_candidates, dynamic=False)
