"""Logits as bits: what their kernels need to know of a format to forbid a token."""

from typing import NamedTuple

import numpy as np


class Bits(NamedTuple):
    """A float format seen as unsigned integers."""

    kind: type
    magnitude: int  # all bits but the sign
    infinity: int  # a magnitude below it is a finite number
    minus_infinity: int


BITS = {
    "float32": Bits(np.uint32, 0x7FFFFFFF, 0x7F800000, 0xFF800000),
    "float16": Bits(np.uint16, 0x7FFF, 0x7C00, 0xFC00),
    "bfloat16": Bits(np.uint16, 0x7FFF, 0x7F80, 0xFF80),
}


def name_of(dtype: np.dtype) -> str:
    """The format of a logits' dtype; ValueError if the kernels don't take it."""
    name = "bfloat16" if dtype == np.uint16 else dtype.name
    if name not in BITS:
        raise ValueError(f"logits.dtype={dtype}, expected float32, float16, bfloat16, or uint16 with bfloat16 bits")
    return name
