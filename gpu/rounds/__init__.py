"""A round of sampling in one call: filter, verification and capture."""

from gpu.rounds.run import run_round

__all__ = ["run_round"]
