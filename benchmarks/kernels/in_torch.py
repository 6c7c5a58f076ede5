"""The same round in plain torch, as a sampler writes it: topk or sort, softmax, cumulative sum, scatter."""

from __future__ import annotations

import torch

from benchmarks.kernels.cases import Inputs, Setting, Shape

STAGES = ("filter", "verify", "capture")


class TorchRound:
    """One input set. A k-th place shared by several tokens is cut by position."""

    def __init__(self, shape: Shape, setting: Setting, inputs: Inputs):
        self.shape, self.setting, self.inputs = shape, setting, inputs
        self.drafts = inputs.drafts.long()

    def run(self, through: str) -> tuple[torch.Tensor, ...]:
        """The stages up to this one; what the last of them yields."""
        probs, ids, dense = self.filter()
        if through == "filter":
            return probs, ids, dense
        tokens = self.verify(dense)
        return tokens if through == "verify" else (*tokens, *self.capture(probs, ids))

    def filter(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Probabilities [R, n] of the kept tokens, descending, their ids, and all of them dense [R, V]."""
        logits = self.inputs.logits.flatten(0, 1)
        if self.setting.top_k:
            values, ids = logits.topk(self.setting.top_k, -1)
        else:
            values, ids = logits.sort(-1, descending=True)
        probs = values.float().softmax(-1)
        if self.setting.top_p < 1:
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= self.setting.top_p, 0)
            probs = probs / probs.sum(-1, keepdim=True)
        dense = torch.zeros(logits.shape, device=logits.device).scatter_(-1, ids, probs)
        return probs, ids, dense

    def verify(self, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, W] (-1 beyond the committed) and how many drafts are kept [B]; drafts are one-hot."""
        batch, width = self.inputs.accept.shape
        laws = dense.view(batch, width, -1)
        chance = laws[:, :-1].gather(-1, self.drafts[..., None])[..., 0]
        accepted = (self.inputs.accept[:, :-1] < chance).long().cumprod(-1).sum(-1, keepdim=True)
        law = laws.gather(1, accepted[..., None].expand(-1, -1, laws.shape[-1]))[:, 0]
        draft = self.drafts.gather(-1, accepted.clamp(max=width - 2))
        at_draft = torch.where(accepted < width - 1, 0.0, law.gather(-1, draft))
        cdf = law.scatter(-1, draft, at_draft).cumsum(-1, dtype=torch.float64)
        target = self.inputs.draw.gather(-1, accepted) * cdf[:, -1:]
        token = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[-1] - 1)
        place = torch.arange(width, device=dense.device)
        padded = torch.cat((self.drafts, token), -1)
        tokens = torch.where(place < accepted, padded, torch.where(place == accepted, token, -1))
        return tokens, accepted[:, 0]

    def capture(self, probs: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sizes [R], ids [R, n] and log-probabilities [R, n] of the supports; -inf past each size."""
        return (probs > 0).sum(-1), ids, probs.log()

    def law(self, row: int) -> torch.Tensor:
        """float32 [V]: the filtered distribution of a row."""
        return self.filter()[2][row]
