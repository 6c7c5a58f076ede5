"""Linear layers for decoding on the CPU: weights in oneDNN's blocked layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PackedWeight:
    """A copy of a float32 weight in oneDNN's blocked layout, made at the first product and after every change."""

    def __init__(self) -> None:
        self._copy: torch.Tensor | None = None
        self._made_of: object = None

    def product(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: object
    ) -> torch.Tensor:
        """rows [..., inputs] times weight [outputs, inputs], plus bias [outputs]: [..., outputs].

        state: another one whenever the weight's values are others; see `state_of`.
        """
        if state != self._made_of:
            # The layout depends on the row count it is made for: the one made for 8 serves all counts.
            self._copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
            self._made_of = state
        count = rows.numel() // rows.shape[-1]
        if 0 < count < 4:
            # Four rows take less time than one to three, and a single row would be summed in another order.
            flat = rows.reshape(count, -1)
            four = torch.cat((flat, flat[-1:].expand(4 - count, -1)))
            product = torch.ops.mkldnn._linear_pointwise(four, self._copy, bias, "none", [], "")
            return product[:count].view(*rows.shape[:-1], -1)
        return torch.ops.mkldnn._linear_pointwise(rows, self._copy, bias, "none", [], "")


def state_of(weight: torch.Tensor) -> tuple[int, int]:
    """What changes when a parameter's values or place do."""
    return weight.data_ptr(), weight._version


class PackedLinear(nn.Linear):
    """A float32 CPU `nn.Linear` that multiplies with a `PackedWeight`.

    Two to three times as fast as `F.linear` at the row counts of decoding, and a row's result doesn't depend
    on the rows beside it, bit for bit. Where gradients are asked for it is an ordinary `nn.Linear`.
    """

    _packed: PackedWeight | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if input.requires_grad or weight.requires_grad or weight.device.type != "cpu" or _is_compiling():
            return nn.functional.linear(input, weight, self.bias)
        if self._packed is None:
            self._packed = PackedWeight()
        return self._packed.product(input, weight, self.bias, state_of(weight))

    def release(self) -> None:
        """Lets go of the copy; the next product makes it again."""
        self._packed = None

    def __getstate__(self) -> dict[str, Any]:
        # The blocked copy can be neither copied nor pickled.
        return {k: v for k, v in self.__dict__.items() if k != "_packed"}


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


def has_packed(model: nn.Module) -> bool:
    """Whether `pack_linears` has made PackedLinears of this model's layers."""
    return any(type(module) is PackedLinear for module in model.modules())


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
