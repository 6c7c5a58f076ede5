"""Random numbers that depend on a seed and a position only."""

from gpu.random.parameters import ACCEPT, ACCEPT_BLOCK, DRAW, PROPOSAL
from gpu.random.philox import philox_4x32, sample_seeds, uniforms

__all__ = ["ACCEPT", "ACCEPT_BLOCK", "DRAW", "PROPOSAL", "philox_4x32", "sample_seeds", "uniforms"]
