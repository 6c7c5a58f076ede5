"""What produced a set of rollouts, as JSON can hold it."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.batch.state import State
from pipeline.policy.contract import Capabilities
from pipeline.policy.params import SamplingParams
from pipeline.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x")


def describe(state: State, capabilities: Capabilities, params: Sequence[SamplingParams]) -> dict[str, Any]:
    """Models with name, revision and hashes of weights and configuration; options; the distinct parameters; dtype,
    device and versions.

    A rollout's `params_index` points into "params", and its own seed stands beside it.
    """
    return {
        "target": _model(state.target) | {"num_weight_updates": state.target.num_weight_updates},
        "draft": None if state.draft is None else _model(state.draft) | {"method": state.draft.method},
        "options": asdict(state.options),
        "capabilities": capabilities.to_dict(),
        "params": [one.to_dict() for one in params],
        "dtype": str(state.target.dtype).removeprefix("torch."),
        "device": str(state.target.device),
        "versions": {"specmask": __version__, "python": platform.python_version(), **package_versions()},
    }


def _model(model: Any) -> dict[str, Any]:
    return {
        "name": model.name,
        "revision": model.revision,
        "sha256": model.sha256,
        "config_sha256": model.config_sha256,
    }


def package_versions(*others: str) -> dict[str, str]:
    """The versions of what a result depends on and of `others`, of the packages that are installed."""
    versions = {}
    for package in (*PACKAGES, *others):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
