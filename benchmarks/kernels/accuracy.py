"""Distance of filtered distributions from a float64 reference, on a few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.kernels.cases import WIDTH, Inputs, Setting
from benchmarks.kernels.ours import Rounds
from tests.naive import Policy, policy

MAX_REQUESTS = 3


class Reference:
    """The policies of the first rows of up to MAX_REQUESTS requests: rows that are always committed."""

    def __init__(self, inputs: Inputs, setting: Setting):
        logits = inputs.logits[:MAX_REQUESTS, 0].double().cpu().numpy()
        self.rows = [WIDTH * b for b in range(len(logits))]
        self.policies: list[Policy] = [
            policy(row, 1.0, setting.top_k, float(np.float32(setting.top_p))) for row in logits
        ]

    def distance(self, laws: list[np.ndarray]) -> dict[str, Any]:
        """The worst row's tokens in one support and not the other, and its L1 distance; laws [V], a row each."""
        pairs = list(zip(laws, self.policies, strict=True))
        return {
            "rows": len(pairs),
            "rows_at_a_threshold": sum(bool(p.borderline) for _, p in pairs),
            "support_difference": max(int(((law > 0) != p.kept).sum()) for law, p in pairs),
            "l1": float(f"{max(np.abs(law - p.probs).sum() for law, p in pairs):.3g}"),
        }


def of_ours(reference: Reference, rounds: Rounds) -> dict[str, Any]:
    """What the first round has packed, or, of unfiltered rows, how many tokens are kept."""
    first = rounds.rounds[0]
    if "pack" not in rounds.stages:
        counts = first.support.count.get()
        wrong = [
            abs(int(counts[row]) - int(p.kept.sum())) for row, p in zip(reference.rows, reference.policies, strict=True)
        ]
        return {"rows": len(wrong), "support_difference": max(wrong)}
    rounds.calls("pack")[0]()
    torch.cuda.current_stream().synchronize()
    _, capture = first.packed()
    laws = []
    for b, one in enumerate(reference.policies):
        begin, end = capture.offsets[capture.row_start[b] :][:2]
        law = np.zeros(one.kept.size)
        law[capture.token_ids[begin:end]] = np.exp(capture.logprobs[begin:end].astype(np.float64))
        laws.append(law)
    return reference.distance(laws)


def of_peer(reference: Reference, one: Any) -> dict[str, Any]:
    """What a peer's round filters to."""
    return reference.distance([one.law(row).double().cpu().numpy() for row in reference.rows])
