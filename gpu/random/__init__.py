"""Random numbers that depend on a seed and a position only."""

from gpu.random.philox import ACCEPT, DRAW, PROPOSAL, philox_4x32, sample_seeds, uniforms

__all__ = ["ACCEPT", "DRAW", "PROPOSAL", "philox_4x32", "sample_seeds", "uniforms"]
