"""Drafts drawn from logits, and their laws by logits, for backends to agree on."""

from dataclasses import dataclass

import numpy as np

import gpu
from tests.backends import HOST
from tests.rounds import POISONS
from tests.strategies import LANDSCAPES, cast, landscape

PLACES = ("by token", "by table", "by search")
"""How a token's entry is found: they are the same; a table over the vocabulary; among candidates of each draft."""


@dataclass
class Drafting:
    """What D drafts of each of B requests are drawn from."""

    logits: np.ndarray  # [B, D, n]
    parameters: tuple  # temperature, top_k, top_p, min_p of the B * D rows
    uniforms: np.ndarray  # float64 [B, D]

    @property
    def rows(self):
        return self.logits.reshape(-1, self.logits.shape[-1])


def make_drafting(seed, batch, num_drafts, size, dtype, num_poisoned=1):
    """Rows of landscapes that follow each other; a request's policy is one, as a pipeline's."""
    rng = np.random.default_rng(seed)
    first = int(rng.integers(len(LANDSCAPES)))
    num_rows = batch * num_drafts
    x = np.stack([landscape(LANDSCAPES[(first + r) % len(LANDSCAPES)], size, rng) for r in range(num_rows)])
    for row, poison in zip(rng.permutation(num_rows)[:num_poisoned], POISONS, strict=False):
        if poison == "empty":
            x[row] = -np.inf
        else:
            x[row, rng.integers(size)] = poison
    temperature = rng.choice([0, 0.1, 0.7, 1, 1, 2], batch).astype(np.float32)
    top_k = rng.choice([0, 0, 1, 2, 5, 64, max(size - 1, 1), size + 10], batch).astype(np.int32)
    top_p = rng.choice([1, 1, 0.95, 0.5], batch).astype(np.float32)
    min_p = rng.choice([0, 0, 0.05], batch).astype(np.float32)
    uniforms = rng.random((batch, num_drafts))
    uniforms[rng.random(uniforms.shape) < 0.1] = 0
    uniforms[rng.random(uniforms.shape) < 0.1] = 1 - 2**-53
    policy = tuple(x.repeat(num_drafts) for x in (temperature, top_k, top_p, min_p))
    return Drafting(cast(x, dtype).reshape(batch, num_drafts, size), policy, uniforms)


def law_of(drafting, drawn, places, vocabulary, seed=0):
    """The laws of what was drawn, over a vocabulary that has the drafts' entries in some places."""
    rng, (*drafts, size) = np.random.default_rng(seed), drafting.logits.shape
    if places == "by token":
        return gpu.LogitsLaw.of(drafting.logits, drawn)
    if places == "by table":
        table = np.full(vocabulary, -1, np.int32)
        table[rng.permutation(vocabulary)[:size]] = np.arange(size)
        return gpu.LogitsLaw.of(drafting.logits, drawn, vocabulary, entry_of=table)
    ids = [np.sort(rng.permutation(vocabulary)[:size]) for _ in range(int(np.prod(drafts)))]
    ids = np.array(ids, np.int32).reshape(*drafts, size)
    return gpu.LogitsLaw.of(drafting.logits, drawn, vocabulary, token_ids=ids)


def tokens_of(law):
    """The tokens of all entries, int64 [B, D, n], written from the definition."""
    size = law.logits.shape[-1]
    if law.token_ids is not None:
        return law.token_ids.astype(np.int64)
    tokens = np.arange(size)
    if law.entry_of is not None:
        tokens = np.array([np.flatnonzero(law.entry_of == entry)[0] for entry in range(size)])
    return np.broadcast_to(tokens, law.logits.shape)


def dense_by_hand(drafting, law, order):
    """The laws [B, D, V] from the supports of the filter itself."""
    size = law.logits.shape[-1]
    support = HOST.select_support(drafting.rows, *drafting.parameters, filter_order=order, capacity=size)
    entries = np.zeros((len(drafting.rows), size), np.float32)
    for row, index in enumerate(law.drawn.reshape(-1)):
        temperature, top_k = drafting.parameters[0][row], drafting.parameters[1][row]
        if temperature < 1e-5 or top_k == 1:
            entries[row, index] = 1
        elif support.status[row] == gpu.INVALID:
            entries[row] = np.nan
        else:
            kept = slice(support.count[row])
            share = 1.0 / np.float64(support.total[row])
            entries[row, support.token_ids[row, kept]] = support.weights[row, kept].astype(np.float64) * share
    entries = entries.reshape(law.logits.shape)
    dense = np.where(np.isnan(entries).any(-1, keepdims=True), np.float32(np.nan), np.zeros(law.shape, np.float32))
    np.put_along_axis(dense, tokens_of(law), entries, -1)
    return dense
