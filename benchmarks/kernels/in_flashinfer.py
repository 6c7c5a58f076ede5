"""The round in FlashInfer's operators, in the two orders in which SGLang's DFlash verification uses them.

sparse    topk, softmax over the k, scatter into dense [R, V]; top_k_renorm, top_p_renorm, chain_speculative_sampling;
          topk of the dense probabilities for the capture
dense     softmax over V; the same from there
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernels.cases import Inputs, Setting, Shape

ORDERS = ("sparse", "dense")
STAGES = ("filter", "verify", "capture")
_ALMOST_NONE = 1e-6  # a draft whose own law is this improbable is always kept


def load() -> Any:
    """The module flashinfer.sampling, compiled. ImportError, RuntimeError or OSError where that can't be."""
    import flashinfer.sampling as sampling

    sampling.get_sampling_module()
    return sampling


class FixedSeed:
    """Stands in for a torch.Generator, whose state can't be set while a CUDA graph is captured."""

    def get_state(self) -> torch.Tensor:
        """Seed and offset."""
        return torch.tensor([0, 0], dtype=torch.int64).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Nothing: the next call draws the same numbers."""


class FlashInferRound:
    """One input set and the memory it needs besides."""

    def __init__(self, sampling: Any, shape: Shape, setting: Setting, inputs: Inputs, order: str):
        self.sampling, self.setting, self.order, self.inputs = sampling, setting, order, inputs
        device = inputs.logits.device
        self.top_k = torch.full((shape.rows,), setting.top_k, dtype=torch.int32, device=device)
        self.top_p = torch.full((shape.rows,), setting.top_p, dtype=torch.float32, device=device)
        self.seed = FixedSeed()
        # One-hot laws of the drafts, scaled where the draft is to be kept: its coin times the law is then below
        # the target's probability.
        scale = torch.where(inputs.keep[:, :-1], _ALMOST_NONE, 1.0).float()
        size = (*inputs.drafts.shape, shape.vocabulary)
        self.draft_probs = torch.zeros(size, device=device).scatter_(
            -1, inputs.drafts.long()[..., None], scale[..., None]
        )

    def run(self, through: str) -> tuple[torch.Tensor, ...]:
        """The stages up to this one; what the last of them yields."""
        probs = self.filter()
        if through == "filter":
            return (probs,)
        tokens = self.verify(probs)
        return tokens if through == "verify" else (*tokens, *self.capture(probs))

    def filter(self) -> torch.Tensor:
        """float32 [R, V]: the filtered probabilities."""
        logits = self.inputs.logits.flatten(0, 1)
        if self.order == "sparse":
            values, ids = logits.topk(self.setting.top_k, -1)
            probs = torch.zeros(logits.shape, device=logits.device).scatter_(-1, ids, values.float().softmax(-1))
        else:
            probs = torch.softmax(logits, -1, dtype=torch.float32)
        return self.sampling.top_p_renorm_probs(self.sampling.top_k_renorm_probs(probs, self.top_k), self.top_p)

    def verify(self, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tokens int32 [B, W] (-1 beyond the committed), and FlashInfer's two counts [B]."""
        laws = probs.view(*self.inputs.accept.shape, -1)
        return self.sampling.chain_speculative_sampling(self.draft_probs, self.inputs.drafts, laws, generator=self.seed)

    def capture(self, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sizes [R], ids [R, k] and log-probabilities [R, k] of the supports; -inf past each size."""
        values, ids = probs.topk(self.setting.top_k, -1)
        return (values > 0).sum(-1), ids, values.log()

    def law(self, row: int) -> torch.Tensor:
        """float32 [V]: the filtered distribution of a row."""
        return self.filter()[row]
