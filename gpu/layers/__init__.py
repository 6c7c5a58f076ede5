"""What decoder layers compute between their matrix products, in one kernel each."""

from gpu.layers.gate import swiglu
from gpu.layers.turn import turn_heads

__all__ = ["swiglu", "turn_heads"]
