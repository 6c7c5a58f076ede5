"""The policy of a row in float64, by sorting: slow and obvious, and no code of the kernels'."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.errors import InvalidRequest
from pipeline.policy.params import SamplingParams

BORDER = 1e-5
"""A row whose filter decides by less is left out of comparisons: float32 may round it the other way."""


def policy(logits: np.ndarray, params: SamplingParams, filter_order: str = "top_k_first") -> tuple[np.ndarray, bool]:
    """The probabilities float64 [V] of a row of logits [V], and whether a filter decides by a hair.

    Raises:
        InvalidRequest: `params` change the logits before temperature: the reference has temperature and filters only.
    """
    if params.adjusts or params.grammar is not None:
        raise InvalidRequest(f"params={params!r}, expected temperature and filters only")
    logits = logits.astype(np.float64)
    if params.greedy:
        return np.eye(len(logits))[logits.argmax()], False
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs /= probs.sum()
    ranked = np.sort(probs)[::-1]
    kept, close = np.ones(len(probs), bool), False
    if params.top_k is not None and params.top_k < len(probs):
        kept &= probs >= ranked[params.top_k - 1]
        close |= bool(0 < ranked[params.top_k - 1] - ranked[params.top_k] < BORDER)
    if params.top_p < 1:
        whole = probs[kept].sum() if filter_order == "top_k_first" else 1.0
        above = np.array([probs[probs > p].sum() for p in probs]) / whole
        close |= bool((np.abs(above - params.top_p) < BORDER).any())
        kept &= above < params.top_p
    if params.min_p > 0:
        close |= bool((np.abs(probs - params.min_p * ranked[0]) < BORDER).any())
        kept &= probs >= params.min_p * ranked[0]
    probs = np.where(kept, probs, 0.0)
    return probs / probs.sum(), close


@torch.inference_mode()
def next_logits(target: object, prefixes: Sequence[Sequence[int]]) -> np.ndarray:
    """The target's logits behind prefixes of one length, by forwards without a cache: float64 [N, V]."""
    model = target.model  # type: ignore[attr-defined]
    rows = []
    for first in range(0, len(prefixes), 4096):
        ids = torch.tensor([list(prefix) for prefix in prefixes[first : first + 4096]], device=model.device)
        rows.append(model(input_ids=ids, use_cache=False).logits[:, -1].double().cpu().numpy())
    return np.concatenate(rows)
