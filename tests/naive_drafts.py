"""The slow, obvious oracle of what the methods do with a block's hidden states: one request, token by token.

Everything is float64 and written from the methods' descriptions; it shares no code with the library.
"""

from __future__ import annotations

import math

import torch


def law(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """softmax(scores / temperature), entry by entry; one-hot at the first largest for 0."""
    if temperature == 0:
        best = max(range(len(scores)), key=lambda i: (float(scores[i]), -i))
        return torch.tensor([float(i == best) for i in range(len(scores))], dtype=torch.float64)
    top = max(float(s) for s in scores)
    mass = [math.exp((float(s) - top) / temperature) for s in scores]
    return torch.tensor([m / sum(mass) for m in mass], dtype=torch.float64)


def first_above(probs: torch.Tensor, uniform: float) -> tuple[int, float]:
    """The first entry whose cumulative probability exceeds the uniform, and how near the uniform is to an edge."""
    found, nearest = len(probs) - 1, 1.0
    for i, p in reversed(list(enumerate(probs.tolist()))):
        edge = float(probs[: i + 1].sum())
        nearest = min(nearest, abs(edge - uniform)) if p else nearest
        if edge > uniform:
            found = i
    return found, nearest


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + math.exp(-x))


def affine(matrix: list[list[float]], bias: list[float], x: list[float]) -> list[float]:
    """matrix x + bias."""
    return [sum(m * v for m, v in zip(row, x, strict=True)) + b for row, b in zip(matrix, bias, strict=True)]


def markov_bias(
    weights: dict[str, torch.Tensor], kind: str, previous: int, hidden: torch.Tensor, state: list[float]
) -> tuple[list[float], list[float]]:
    """What the token before adds to each logit, and the rnn's next state; one number at a time."""
    embedded = weights["markov_head.markov_w1.weight"][previous].tolist()
    rank = len(embedded)
    if kind == "gated":
        inputs = hidden.tolist() + embedded
        matrix = weights["markov_head.gate_proj.weight"].tolist()
        bias = weights["markov_head.gate_proj.bias"].tolist()
        gates = [sigmoid(x) for x in affine(matrix, bias, inputs)]
        latent = [g * e for g, e in zip(gates, embedded, strict=True)]
    elif kind == "rnn":
        inputs = state + embedded + hidden.tolist()
        matrix = weights["markov_head.joint_proj.weight"].tolist()
        bias = weights["markov_head.joint_proj.bias"].tolist()
        out = affine(matrix, bias, inputs)
        gates = [sigmoid(x) for x in out[:rank]]
        state = [g * s + (1 - g) * math.tanh(c) for g, s, c in zip(gates, state, out[rank : 2 * rank], strict=True)]
        latent = [math.tanh(x) for x in out[2 * rank :]]
    else:
        latent = embedded
    rows = weights["markov_head.markov_w2.weight"].tolist()
    return [sum(w * x for w, x in zip(row, latent, strict=True)) for row in rows], state


def dspark(
    weights: dict[str, torch.Tensor],
    kind: str,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    anchor: int,
    temperature: float,
    uniforms: list[float],
    with_markov: bool,
    tokens_of: list[int],
) -> tuple[list[int], list[torch.Tensor], list[float], float]:
    """DSpark's drafts after an anchor: tokens, laws over the draft's vocabulary, confidences, nearest edge.

    logits [D, n] and hidden [D, d] of the drafts; tokens_of: the target's token of each of the draft's.
    """
    tokens, laws, confidences, nearest = [], [], [], 1.0
    ranked = "markov_head.markov_w1.weight" in weights
    state = [0.0] * (weights["markov_head.markov_w1.weight"].shape[1] if ranked else 0)
    for k in range(logits.shape[0]):
        previous = tokens[-1] if tokens else anchor
        scores, features = logits[k].clone(), hidden[k].tolist()
        if ranked:
            bias, state = markov_bias(weights, kind, previous, hidden[k], state)
            scores = scores + torch.tensor(bias, dtype=torch.float64)
            if with_markov:
                features += weights["markov_head.markov_w1.weight"][previous].tolist()
        if "confidence_head.proj.weight" in weights:
            row = weights["confidence_head.proj.weight"][0].tolist()
            total = sum(w * x for w, x in zip(row, features, strict=True))
            confidences.append(sigmoid(total + float(weights["confidence_head.proj.bias"][0])))
        laws.append(law(scores, temperature))
        index, edge = first_above(laws[-1], uniforms[k])
        nearest = min(nearest, edge)
        tokens.append(tokens_of[index])
    return tokens, laws, confidences, nearest


def select(
    weights: dict[str, torch.Tensor],
    top_k: int,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    anchor: int,
    temperature: float,
    uniforms: list[float],
) -> tuple[list[int], list[torch.Tensor], float]:
    """DFlash 2's drafts after an anchor: tokens, laws over the whole vocabulary, nearest edge.

    Candidates are those with the largest unaries, walked in ascending token id.
    """
    tokens, laws, nearest = [], [], 1.0
    first, second = (weights[f"candidate_selector.{p}_codebook"] for p in ("predecessor", "successor"))
    for k in range(logits.shape[0]):
        previous = tokens[-1] if tokens else anchor
        order = sorted(sorted(range(logits.shape[1]), key=lambda b: (-float(logits[k, b]), b))[:top_k])
        projected = (weights["candidate_selector.hidden_projection.weight"] @ hidden[k]).tolist()
        scores = []
        for b in order:
            terms = zip(first[previous].tolist(), projected, second[b].tolist(), strict=True)
            scores.append(float(logits[k, b]) + sum(a * h * s for a, h, s in terms))
        probs = law(torch.tensor(scores, dtype=torch.float64), temperature)
        index, edge = first_above(probs, uniforms[k])
        nearest = min(nearest, edge)
        tokens.append(order[index])
        whole = torch.zeros(logits.shape[1], dtype=torch.float64)
        for b, p in zip(order, probs, strict=True):
            whole[b] = p
        laws.append(whole)
    return tokens, laws, nearest


def convolve(rows: torch.Tensor, base: torch.Tensor, deltas: torch.Tensor, group: int) -> torch.Tensor:
    """Rows [w, d] of a block: out[i, c] = sum_t (base[t, c] + deltas[i, t, c // group]) * rows[i - t, c]."""
    out = torch.zeros_like(rows)
    for i in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            for t in range(base.shape[0]):
                if i - t >= 0:
                    out[i, c] += (base[t, c] + deltas[i, t, c // group]) * rows[i - t, c]
    return out
