"""How a model's drafts are drawn: by `gpu.draw_drafts`, under the policies of their requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import gpu
from model_loaders.drafts.proposal import ProposalLaw
from pipeline.arrays import array_of


class Drawing:
    """Draws D drafts of B requests: the `Draw` that a draft asks for, and the laws of what it drew.

    Its memory is used again in every round, so that a CUDA graph can hold them; a graph must not outlive it.

    Args:
        policy: Of w, the arrays temperature, top_k, top_p and min_p of w rows a request, [B * w] each.
        uniforms: float64 [B, D]: the coins.
        filter_order: The pipeline's.
        whole_rows: As of `gpu.select_support`; it may change from round to round.
    """

    def __init__(
        self,
        policy: Callable[[int], list[Any]],
        uniforms: torch.Tensor,
        filter_order: str,
        whole_rows: bool = False,
    ):
        self.policy, self.uniforms, self.filter_order, self.whole_rows = policy, uniforms, filter_order, whole_rows
        self._index = torch.zeros(uniforms.shape, dtype=torch.int64, device=uniforms.device)
        self._drawn: gpu.Drawn | None = None

    def __call__(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        """The entries of drafts k..k+w-1 from their logits [B, w, n], int64 [B, w]."""
        width = logits.shape[1]
        temperature, top_k, top_p, min_p = self.policy(width)
        self._drawn = gpu.draw_drafts(
            array_of(logits),
            temperature,
            top_k,
            top_p,
            min_p,
            array_of(self.uniforms),
            array_of(self._index),
            k,
            filter_order=self.filter_order,
            whole_rows=self.whole_rows,
            out=self._drawn,
        )
        return self._index[:, k : k + width]

    def law(self, law: ProposalLaw, vocabulary: int) -> gpu.LogitsLaw:
        """The laws over V tokens of the drafts that were drawn from these logits."""
        assert self._drawn is not None
        places = {
            name: None if ids is None else array_of(ids)
            for name, ids in (("entry_of", law.entry_of), ("token_ids", law.token_ids))
        }
        return gpu.LogitsLaw.of(array_of(law.logits), self._drawn, vocabulary, **places)
