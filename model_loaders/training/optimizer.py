"""Muon for the layers' matrices, AdamW for norms, embeddings, heads and biases.

Muon (torch.optim.Muon) orthogonalises a matrix's momentum; its steps are scaled to the size of AdamW's, so that one
learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

_MUON, _ADAMW = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Of named float32 weights that have gradients when it steps."""

    def __init__(self, named: Mapping[str, Tensor], weight_decay: float):
        hidden = {name for name, weight in named.items() if weight.ndim == 2 and name.startswith(("layers.", "fc."))}
        self._named = dict(named)
        self._optimizers: list[torch.optim.Optimizer] = []
        if hidden:
            self._muon = torch.optim.Muon(
                [weight for name, weight in named.items() if name in hidden],
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self._optimizers.append(self._muon)
        self._adamw = torch.optim.AdamW(
            [weight for name, weight in named.items() if name not in hidden],
            betas=(0.9, 0.95),
            weight_decay=weight_decay,
            fused=any(weight.is_cuda for weight in named.values()),
        )
        self._optimizers.append(self._adamw)
        self._of = {name: self._muon if name in hidden else self._adamw for name in named}

    def step(self, learning_rate: float) -> None:
        """One step down the weights' gradients."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """(weight's name, key, moment) of what later steps depend on; none before the first step."""
        for name, optimizer in self._of.items():
            state = optimizer.state[self._named[name]]
            for key in self._keys(name):
                if key in state:
                    yield name, key, state[key]

    def restore(self, step: int, moment: Callable[[str, str], Tensor]) -> None:
        """Go on after `step` steps with the moments of (weight's name, key)."""
        for name, optimizer in self._of.items():
            weight = self._named[name]
            state = {key: moment(name, key) for key in self._keys(name)}
            if optimizer is self._adamw:
                state["step"] = torch.tensor(float(step), device=weight.device)
            optimizer.state[weight] = state

    def _keys(self, name: str) -> tuple[str, ...]:
        return _ADAMW if self._of[name] is self._adamw else _MUON
