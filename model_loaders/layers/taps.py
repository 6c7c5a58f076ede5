"""Features for the draft: the outputs of chosen decoder layers, taken by forward hooks.

Layer id L is the output of decoder layer L (transformers' `hidden_states[L + 1]`); -1 is what enters
layer 0 (`hidden_states[0]`, the embedding output, scaled where the model scales it). The last layer's
entry is taken before the final norm, unlike `hidden_states[-1]`, which is after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class LayerTaps:
    """Forward hooks on the tapped layers only; each forward overwrites what they hold."""

    def __init__(self, layers: Sequence[nn.Module], layer_ids: Sequence[int], overwritten: bool = False):
        """`layers`: the decoder layers in order. `layer_ids`: each in -1..len(layers)-1, distinct.

        overwritten: a layer's output doesn't outlive the next layer, so what is tapped is copied.

        Raises ValueError (`layer_ids=value, expected ...`).
        """
        self.layer_ids = tuple(int(i) for i in layer_ids)
        if any(not -1 <= i < len(layers) for i in self.layer_ids):
            raise ValueError(f"layer_ids={list(self.layer_ids)}, expected each in -1..{len(layers) - 1}")
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise ValueError(f"layer_ids={list(self.layer_ids)}, expected distinct ids")
        self._overwritten = overwritten
        self._held: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []
        for i in self.layer_ids:
            if i == -1:
                handle = layers[0].register_forward_pre_hook(self._input_hook, with_kwargs=True)
            else:
                handle = layers[i].register_forward_hook(self._output_hook(i))
            self._handles.append(handle)

    def features(self) -> torch.Tensor | None:
        """The last forward's features [b, w, len(layer_ids) * hidden] in the ids' order, and lets them go.

        None without ids.
        """
        if not self.layer_ids:
            return None
        parts = [self._held[i] for i in self.layer_ids]
        self._held.clear()
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def remove(self) -> None:
        """Takes the hooks off; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._held.clear()

    def _input_hook(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._hold(-1, args[0] if args else kwargs["hidden_states"])

    def _output_hook(self, layer_id: int):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            self._hold(layer_id, output[0] if isinstance(output, tuple) else output)

        return hook

    def _hold(self, layer_id: int, rows: torch.Tensor) -> None:
        self._held[layer_id] = rows.clone() if self._overwritten else rows
