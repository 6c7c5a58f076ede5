"""The policies of a batch's requests as `gpu` takes them, a row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import gpu
from pipeline.policy.params import SamplingParams


def row_policies(params: Sequence[SamplingParams], rows: int, vocabulary: int, beside: Any) -> list[Any]:
    """temperature, top_k, top_p and min_p of so many rows a request, [B * rows] each, where the array `beside` is."""
    columns = (
        np.array([p.temperature for p in params], np.float32),
        np.array([min(p.top_k or 0, vocabulary) for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
    )
    return [gpu.beside(beside, np.repeat(values, rows)) for values in columns]


def weighed_whole(params: SamplingParams, vocabulary: int, filter_order: str) -> bool:
    """Whether a row's filter needs the mass of all logits: no top_k bounds them, or top_p is a part of all."""
    if params.greedy:
        return False
    unbounded = params.top_k is None or params.top_k >= vocabulary
    return unbounded or (filter_order == "joint" and params.top_p < 1)
