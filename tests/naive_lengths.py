"""The exact law of what speculative decoding commits under any rule for lengths, by enumeration in float64."""

from __future__ import annotations

import itertools

import numpy as np


def committed_law(target, draft, length_of, num_drafts, vocabulary, outcomes):
    """The law of the first num_drafts + 1 tokens: float64 [vocabulary, ..., vocabulary].

    target(prefix) and draft(prefix): float64 [vocabulary], the laws of the next token after a tuple of tokens.
    length_of(drafts): how many of a tuple of drafts are verified. What a round doesn't commit comes from the target.
    outcomes: the rule of verification, `draft_by_draft` or `as_block`.
    """
    law = np.zeros((vocabulary,) * (num_drafts + 1))
    for drafts in itertools.product(range(vocabulary), repeat=num_drafts):
        drawn = 1.0
        for k in range(num_drafts):
            drawn *= draft(drafts[:k])[drafts[k]]
        for k, of_token in enumerate(outcomes(target, draft, drafts[: length_of(drafts)])):
            for token in range(vocabulary):
                extend(law, target, (*drafts[:k], token), drawn * of_token[token])
    return law


def draft_by_draft(target, draft, drafts):
    """Leviathan et al. 2023: for k = 0.., float64 [V]: the chances that k drafts are kept and that token follows."""
    outcomes, reached = [], 1.0
    for k, token in enumerate(drafts):
        wanted, proposed = target(drafts[:k]), draft(drafts[:k])
        accept = min(1.0, wanted[token] / proposed[token])
        residual = np.maximum(wanted - proposed, 0)
        outcomes.append(reached * (1 - accept) * residual / residual.sum() if accept < 1 else 0 * residual)
        reached *= accept
    return [*outcomes, reached * target(drafts)]


def as_block(target, draft, drafts):
    """The same of Sun et al. 2024, algorithm 2: the largest k whose coin is below its bound."""
    scale, bounds, laws = 1.0, [], []
    for k, token in enumerate(drafts):
        wanted, proposed = target(drafts[:k]), draft(drafts[:k])
        residual = np.maximum(scale * wanted - proposed, 0)
        whole = residual.sum() + (1 - scale)
        bounds.append(residual.sum() / whole if whole > 0 else 1.0)
        laws.append(residual / residual.sum() if residual.sum() > 0 else wanted)
        scale = min(1.0, scale * wanted[token] / proposed[token])
    bounds.append(scale)
    laws.append(target(drafts))
    assert bounds[0] == 1
    return [h * np.prod([1 - other for other in bounds[k + 1 :]]) * laws[k] for k, h in enumerate(bounds)]


def expected_kept(target, draft, num_drafts, vocabulary, outcomes):
    """How many of num_drafts drafts a round keeps in expectation."""
    kept = 0.0
    for drafts in itertools.product(range(vocabulary), repeat=num_drafts):
        drawn = 1.0
        for k in range(num_drafts):
            drawn *= draft(drafts[:k])[drafts[k]]
        kept += drawn * sum(k * of_token.sum() for k, of_token in enumerate(outcomes(target, draft, drafts)))
    return kept


def extend(law, target, prefix, probability):
    """Add the probability of a prefix to every sequence that begins with it, by the target's law."""
    if len(prefix) == law.ndim:
        law[prefix] += probability
        return
    for token, share in enumerate(target(prefix)):
        extend(law, target, (*prefix, token), probability * share)


def target_law(target, length, vocabulary):
    """The target's own law of so many tokens."""
    law = np.zeros((vocabulary,) * length)
    extend(law, target, (), 1.0)
    return law


def schedule(confidence, most, cost):
    """The throughput schedule, draft by draft: admit the likeliest survivor while tokens a second go up."""
    batch = len(confidence)
    lengths = [0] * batch

    def survival(b, k):
        product = 1.0
        for c in confidence[b][: k + 1]:
            product *= float(c)
        return product

    tokens, rows = float(batch), batch
    while True:
        left = [
            (-survival(b, k), k, b) for b in range(batch) for k in range(lengths[b], min(most[b], len(confidence[b])))
        ]
        if not left:
            return lengths
        gain, k, b = min(left)
        if (tokens - gain) / cost(rows + 1) <= tokens / cost(rows):
            return lengths
        tokens, rows, lengths[b] = tokens - gain, rows + 1, k + 1
