"""The blocks of one training step: random anchors, and the hidden states of their blocks (arXiv 2602.06036, section 4).

Each anchor's block sees the context strictly before the anchor and itself, never another block, so all blocks of a text
train in one forward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from model_loaders.drafts.backbone import Backbone
from model_loaders.training.dataset import Batch


def draw_anchors(batch: Batch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct random anchors int64 [b, count], sorted, and which are real (bool): short texts have fewer.

    An anchor is an answer's token that isn't its last, as in decoding, where the first anchor is the first
    token sampled from the prompt.
    """
    at = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    allowed = (at >= batch.answer_starts[:, None]) & (at < batch.lengths[:, None] - 1)
    keys = torch.rand(batch.tokens.shape, generator=generator, device=batch.tokens.device)
    chosen = torch.where(allowed, keys, -1.0).topk(min(count, at.shape[0]), dim=1)
    anchors, order = chosen.indices.sort(dim=1)
    return anchors, (chosen.values >= 0).gather(1, order)


def block_hidden(
    module: Backbone,
    x: Tensor,
    features: Tensor,
    anchors: Tensor,
    parameters: dict[str, Tensor] | None = None,
) -> Tensor:
    """Hidden states [b, A, B, d] of blocks x [b, A, B, d] at anchors [b, A], given features [b, L, m*d].

    parameters: used in the module's place (a copy of lower precision); gradients flow to them.
    """
    b, count, block, d = x.shape
    positions = anchors.unsqueeze(-1) + torch.arange(block, device=x.device)
    step = _Blocks(module)
    named = {f"module.{name}": tensor for name, tensor in (parameters or {}).items()}
    args = (x.reshape(b, count * block, d), features, positions)
    return functional_call(step, named, args).view(b, count, block, d)


class _Blocks(torch.nn.Module):
    """The forward of all blocks of a batch as one module, so that functional_call can swap its parameters."""

    def __init__(self, module: Backbone):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        at = torch.arange(features.shape[1], device=x.device).expand(features.shape[0], -1)
        context_keys, context_values = (part.unbind(0) for part in self.module.context_keys_values(features, at))

        def attend_to(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cat([context_keys[layer], keys], 2), torch.cat([context_values[layer], values], 2)

        return self.module(x, positions.flatten(1), attend_to, self._masks(positions, features.shape[1], x.dtype))

    def _masks(self, positions: Tensor, length: int, dtype: torch.dtype) -> list[Tensor]:
        """Each layer's mask, n = L + A*B, for block positions [b, A, B]."""
        config, (b, count, block) = self.module.config, positions.shape
        query = positions.flatten(1).unsqueeze(-1)
        start = positions[..., :1].expand(-1, -1, block).flatten(1).unsqueeze(-1)
        key = torch.arange(length, device=positions.device)
        own = torch.arange(count * block, device=positions.device) // block
        same = (own.unsqueeze(1) == own).expand(b, -1, -1)
        made: dict[tuple[bool, int | None], Tensor] = {}
        masks = []
        for layer in range(config.num_layers):
            causal, window = kind = (config.is_causal(layer), config.window(layer))
            if kind not in made:
                context, inside = key < start, same
                distance = query - positions.flatten(1).unsqueeze(1)
                if causal:
                    inside = inside & (distance >= 0)
                if window is not None:
                    context = context & (query - key < window)
                    inside = inside & (distance.abs() < window)
                made[kind] = config.mask_of(torch.cat([context, inside], -1), dtype)
            masks.append(made[kind])
        return masks
