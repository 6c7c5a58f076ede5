"""Linear layers of one input as one matrix product.

On a GPU each product of a small model is mostly its launch; on a CPU every product is parted among the threads anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_loaders.layers.packed_linear import PackedLinear, PackedWeight, state_of


class JointLinear:
    """``nn.Linear``s of one input width whose weights lie one behind another in one tensor.

    weight [outputs of all parts, inputs], bias [outputs of all parts] or None: of all parts. The parts' own parameters
    are views of them, so nothing is held twice, and what is copied into a parameter is seen here. `PackedLinear`s are
    multiplied with a packed copy of all, to the bits of their own products.
    """

    def __init__(self, parts: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None):
        """By `of`, or as a slice of another."""
        self.parts, self.weight, self.bias = tuple(parts), weight, bias
        self._packed = PackedWeight() if all(type(part) is PackedLinear for part in parts) else None

    @classmethod
    @torch.inference_mode(False)
    def of(cls, parts: Sequence[nn.Linear]) -> JointLinear:
        """Moves the parts' parameters, which keep their names and identity, into one tensor.

        All of the parts have a bias, or none.
        """
        weight = _in_one([part.weight for part in parts])
        return cls(parts, weight, None if parts[0].bias is None else _in_one([part.bias for part in parts]))

    def __getitem__(self, index: slice) -> JointLinear:
        """Some neighbouring parts."""
        rows = [len(part.weight) for part in self.parts]
        begin = sum(rows[: index.start or 0])
        own = slice(begin, begin + sum(rows[index]))
        return JointLinear(self.parts[index], self.weight[own], None if self.bias is None else self.bias[own])

    @property
    def usable(self) -> bool:
        """Whether no gradient is recorded and the parts' weights are still those in `weight`.

        They aren't within ``functional_call`` with other ones, or after a part was converted.
        """
        if torch.is_grad_enabled():
            return False
        at = self.weight.data_ptr()
        for part in self.parts:
            if part.weight.data_ptr() != at:
                return False
            at += part.weight.nbytes
        return True

    def __call__(self, rows: Tensor) -> Tensor:
        """The parts' outputs one behind another, [..., outputs of all parts], of rows [..., inputs]."""
        if self._packed is None:
            return nn.functional.linear(rows, self.weight, self.bias)
        # Versions are counted by parameter: a view's don't show in the whole's.
        state = tuple(state_of(part.weight) for part in self.parts)
        return self._packed.product(rows, self.weight, self.bias, state)

    def release_parts(self) -> None:
        """Lets go of the copies of packed parts; whoever calls a part by itself makes its own again."""
        for part in self.parts:
            if isinstance(part, PackedLinear):
                part.release()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        # A module's copy has parameters of its own, which lie apart: it starts without.
        return type(None), ()


def add_product(x: Tensor, linear: nn.Linear, rows: Tensor) -> Tensor:
    """x + linear(rows), [..., outputs]; without gradients the product is added to x in place, as its own last step."""
    if torch.is_grad_enabled() or type(linear) is not nn.Linear or linear.bias is not None:
        return x + linear(rows)
    x.view(-1, x.shape[-1]).addmm_(rows.flatten(0, -2), linear.weight.t())
    return x


def _in_one(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor that holds these one behind another; they become views of it."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, piece in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = piece
    return whole
