"""RMS norms in one call: on a GPU one kernel each, where transformers' own take seven.

A decoding round of a small model is launches: of the 30 layers of the demo model, 366 go to 61 norms. On a CPU a norm
of one row takes 21 us instead of 35.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class FusedNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight``, computed in float32 and rounded once.

    transformers rounds to the model's dtype before it multiplies with the weight, so in bfloat16 the last bit of an
    element may differ.
    """

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., d] -> [..., d]."""
        return nn.functional.rms_norm(hidden_states, (hidden_states.shape[-1],), self.weight, self.eps)


def fuse_norms(model: nn.Module) -> int:
    """Puts a FusedNorm, with the same parameter under the same name, in the place of every module that computes one.

    A module is recognised by what it computes: random rows come out the same. Returns how many there were.
    """
    found = 0
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, module in children:
            eps = _eps_of(module)
            if eps is not None and _computes_rms_norm(module, eps):
                setattr(parent, name, FusedNorm(module.weight, eps))
                found += 1
    return found


def _eps_of(module: Any) -> float | None:
    """The epsilon of what may be an RMS norm: one parameter, a vector named weight."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module.weight.ndim != 1 or list(module.children()) or list(module.buffers()):
        return None
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


@torch.no_grad()
def _computes_rms_norm(module: Any, eps: float) -> bool:
    weight = module.weight
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(4, weight.shape[0], generator=generator)
    rows = torch.cat((rows, eps**0.5 * rows)).to(weight.device, weight.dtype)  # small ones show where eps goes
    got, want = module(rows), nn.functional.rms_norm(rows, (weight.shape[0],), weight, eps)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    # Two roundings against one.
    return torch.allclose(got.float(), want.float(), rtol=3 * torch.finfo(weight.dtype).eps, atol=1e-6)
