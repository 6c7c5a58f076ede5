"""Measurements; each writes JSON with machine, versions and commit to benchmarks/results/."""
