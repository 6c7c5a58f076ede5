"""What DSpark's heads make of blocks' hidden states in training. Previous tokens are the text's own (DeepSpec)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from model_loaders.drafts.dspark import DSparkConfig, DSparkModule

_MARKOV, _CONFIDENCE = "markov_head.", "confidence_head.proj."


def before_heads(module: DSparkModule, weights: dict[str, Tensor], hidden: Tensor, previous: Tensor) -> list[Tensor]:
    """Hidden states [b, A, B, d] and, with a Markov head, embeddings and latents [b, A, B, r] of the previous tokens
    int64 [b, A, B].

    weights: the module's parameters by name, or copies of them.
    """
    if module.markov_head is None:
        return [hidden]
    named = {name.removeprefix(_MARKOV): tensor for name, tensor in weights.items() if name.startswith(_MARKOV)}
    embedded = F.embedding(previous, named["markov_w1.weight"])
    state, latents = torch.zeros_like(embedded[:, :, 0]), []
    for k in range(hidden.shape[2]):
        latent, state = functional_call(module.markov_head, named, (embedded[:, :, k], hidden[:, :, k], state))
        latents.append(latent)
    return [hidden, embedded, torch.stack(latents, 2)]


def heads(
    config: DSparkConfig, weights: dict[str, Tensor], head: Callable[[Tensor], Tensor], rows: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Logits float32 [n, V] and confidences' logits float32 [n] or None, of rows of `before_heads`' tensors."""
    logits, features = head(rows[0]).float(), rows[0]
    if len(rows) > 1:
        logits = logits + F.linear(rows[2], weights[f"{_MARKOV}markov_w2.weight"]).float()
        if config.confidence_with_markov:
            features = torch.cat((rows[0], rows[1]), -1)
    if not config.confidence_head:
        return logits, None
    confidence = F.linear(features, weights[f"{_CONFIDENCE}weight"], weights[f"{_CONFIDENCE}bias"])
    return logits, confidence.squeeze(-1).float()
