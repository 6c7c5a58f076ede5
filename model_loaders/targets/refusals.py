"""What can't be served, told from a target's config and from transformers' report of loading it.

The per-row cache can't represent every architecture; those it can't are refused here by name, the rest by the first
forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_loaders.errors import CheckpointError

# transformers' names of a layer that attends to everything before it.
_FULL_ATTENTION = {"full_attention", "attention"}


def refuse_unsupported(config: Any, name: str) -> None:
    """Raises CheckpointError for what can be told from the config; the first forward tells the rest."""
    kind = f"{name} (model_type {config.model_type!r})"
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{kind}: is_encoder_decoder=True, expected a decoder-only causal language model")
    for key in ("vision_config", "audio_config", "text_config"):
        if getattr(config, key, None) is not None:
            raise CheckpointError(f"{kind}: {key} is set, expected a text-only checkpoint: multimodal isn't supported")
    layer_types = getattr(config, "layer_types", None)
    other = sorted(set(layer_types or ()) - _FULL_ATTENTION)
    if other:
        raise CheckpointError(
            f"{kind}: layer_types has {', '.join(other)}, expected full_attention only: the per-row cache can't "
            "represent sliding or chunked windows, nor recurrent layers"
        )
    window = getattr(config, "sliding_window", None)
    if not layer_types and window is not None and getattr(config, "use_sliding_window", True):
        raise CheckpointError(
            f"{kind}: sliding_window={window}, expected None: the per-row cache can't represent sliding windows"
        )
    if config.model_type == "gpt_oss":
        raise CheckpointError(f"{kind}: attention sinks, expected plain softmax attention")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type"))
    if rope_type in ("dynamic", "longrope"):
        raise CheckpointError(
            f"{kind}: rope_type={rope_type!r}, expected one that depends on the position alone: with this one a "
            "row's rotation depends on the longest row of its batch"
        )


def refuse_wrong_tensors(info: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError for missing, unexpected or misshapen tensors in transformers' loading report."""
    # transformers fills what is missing with random numbers and warns; that would be a silent wrong answer.
    if info["mismatched_keys"]:
        key, found, expected = min(info["mismatched_keys"])
        more = len(info["mismatched_keys"]) - 1
        raise CheckpointError(
            f"{name}: {key} has shape {list(found)}, expected {list(expected)}"
            f"{f' (and {more} more)' if more else ''}: config.json and weights don't belong together"
        )
    wanted = {"missing": "every weight of the model", "unexpected": "the model's weights only"}
    for kind, expected in wanted.items():
        keys = sorted(k for k in info[f"{kind}_keys"] if not k.endswith("rotary_emb.inv_freq"))
        if keys:
            listed = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
            raise CheckpointError(
                f"{name}: {kind} tensors {listed}, expected {expected}: the checkpoint is incomplete or of another "
                "architecture than its config says"
            )
    if info.get("error_msgs"):
        raise CheckpointError(f"{name}: {info['error_msgs'][0]}")
