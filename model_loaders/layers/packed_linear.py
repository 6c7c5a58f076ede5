"""Linear layers for decoding on the CPU: weights in oneDNN's blocked layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PackedLinear(nn.Linear):
    """A float32 CPU `nn.Linear` that multiplies with a copy of its weight in oneDNN's blocked layout.

    Two to three times as fast as `F.linear` at the row counts of decoding, and a row's result doesn't depend
    on the rows beside it, bit for bit. The copy is made at the first call and again after the weight has
    changed. Where gradients are asked for it is an ordinary `nn.Linear`.
    """

    _packed: torch.Tensor | None = None
    _packed_from: tuple[int, int] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if input.requires_grad or weight.requires_grad or weight.device.type != "cpu" or _is_compiling():
            return nn.functional.linear(input, weight, self.bias)
        state = (weight.data_ptr(), weight._version)
        if state != self._packed_from:
            # The layout depends on the row count it is made for: the one made for 8 serves all counts.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
            self._packed_from = state
        rows = input.numel() // input.shape[-1]
        if 0 < rows < 4:
            # Four rows take less time than one to three, and a single row would be summed in another order.
            flat = input.reshape(rows, -1)
            four = torch.cat((flat, flat[-1:].expand(4 - rows, -1)))
            product = torch.ops.mkldnn._linear_pointwise(four, self._packed, self.bias, "none", [], "")
            return product[:rows].view(*input.shape[:-1], -1)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")

    def __getstate__(self) -> dict[str, Any]:
        # The blocked copy can be neither copied nor pickled.
        return {k: v for k, v in self.__dict__.items() if k not in ("_packed", "_packed_from")}


def pack_linears(model: nn.Module, max_bytes: int = 4 << 30) -> bool:
    """Makes the model's float32 `nn.Linear`s `PackedLinear`s, which costs a copy of their weights.

    Leaves a model alone, and returns False, where the copy would exceed max_bytes or torch lacks oneDNN.
    Parameters and their names stay as they are.
    """
    linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.float32]
    if sum(m.weight.numel() * 4 for m in linears) > max_bytes or not _has_packed_linear():
        return False
    for linear in linears:
        linear.__class__ = PackedLinear
    return True


def _is_compiling() -> bool:
    return torch.compiler.is_compiling()


def _has_packed_linear() -> bool:
    # Not a public operator (torch.compile's CPU backend is built on it), so: try it.
    if not torch.backends.mkldnn.is_available():
        return False
    weight, rows = torch.eye(16), torch.ones(3, 16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        product = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.equal(product, rows)
