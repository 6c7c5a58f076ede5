"""The exact law of what speculative decoding commits under any rule for lengths, by enumeration in float64."""

from __future__ import annotations

import itertools

import numpy as np


def committed_law(target, draft, length_of, num_drafts, vocabulary):
    """The law of the first num_drafts + 1 tokens: float64 [vocabulary, ..., vocabulary].

    target(prefix) and draft(prefix): float64 [vocabulary], the laws of the next token after a tuple of tokens.
    length_of(drafts): how many of a tuple of drafts are verified. What a round doesn't commit comes from the target.
    """
    law = np.zeros((vocabulary,) * (num_drafts + 1))
    for drafts in itertools.product(range(vocabulary), repeat=num_drafts):
        reached = 1.0
        for k in range(num_drafts):
            reached *= draft(drafts[:k])[drafts[k]]
        for k in range(length_of(drafts) + 1):
            wanted = target(drafts[:k])
            if k == length_of(drafts):
                replaced = wanted
            else:
                proposed = draft(drafts[:k])
                accept = min(1.0, wanted[drafts[k]] / proposed[drafts[k]])
                residual = np.maximum(wanted - proposed, 0)
                replaced = (1 - accept) * residual / residual.sum() if accept < 1 else 0 * residual
            for token in range(vocabulary):
                extend(law, target, (*drafts[:k], token), reached * replaced[token])
            if k < length_of(drafts):
                reached *= accept
    return law


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
