"""Weights stored as int8 with a scale a row: half of bfloat16's size.

The layout is compressed-tensors' "int-quantized" with symmetric channel-wise weights and plain activations:
`name.weight` int8 [rows, columns] beside `name.weight_scale` [rows, 1], and a `quantization_config` that says so.
Matrices that aren't a layer's weight (DFlash 2's codebooks) are stored the same way, under their own names.
A weight is int8 * scale, with scale = max |row| / 127; loading multiplies, and the draft runs in the target's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model_loaders.errors import CheckpointError

KEY, SCALE = "quantization_config", "_scale"
_LARGEST = 127

CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": None,
        }
    },
    "ignore": [],
}


def is_row_scaled(raw: dict[str, Any], path: Any) -> bool:
    """Whether a config.json describes such weights. Raises CheckpointError for any other quantisation."""
    found = raw.get(KEY)
    if found is None:
        return False
    groups = found.get("config_groups") if isinstance(found, dict) else None
    wanted = CONFIG["config_groups"]["group_0"]
    plain = isinstance(groups, dict) and all(
        isinstance(group, dict)
        and isinstance(group.get("weights"), dict)
        and {key: group["weights"].get(key) for key in wanted["weights"]} == wanted["weights"]
        and group.get("input_activations") is None
        for group in groups.values()
    )
    if not plain or any(found.get(key) != CONFIG[key] for key in ("quant_method", "format")):
        raise CheckpointError(
            f"{path}: {KEY}={found!r}, expected none, or {CONFIG['quant_method']} of format {CONFIG['format']} with "
            "int8 weights, a symmetric scale a channel and plain activations; use the checkpoint that it was made from"
        )
    return True


def row_scaled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices among these as int8 with float32 scales, the rest unchanged."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_floating_point():
            stored[name] = tensor
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / _LARGEST
        stored[name] = (tensor.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def weights_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that `row_scaled` stored, float32.

    Raises CheckpointError for an int8 tensor without its scale, or a scale without its tensor or of another shape.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE) and (stored := tensors.get(name.removesuffix(SCALE))) is not None:
            if stored.dtype != torch.int8:
                raise CheckpointError(f"tensor {name} scales one of dtype {stored.dtype}, expected int8")
            continue
        if tensor.dtype != torch.int8:
            weights[name] = tensor
            continue
        scale = tensors.get(name + SCALE)
        if scale is None:
            raise CheckpointError(f"tensor {name} is int8 without {name + SCALE}; fetch all files")
        if tensor.ndim != 2 or scale.shape != (len(tensor), 1):
            raise CheckpointError(
                f"tensor {name + SCALE} has shape {list(scale.shape)}, expected {[*tensor.shape[:1], 1]}: one a row"
            )
        weights[name] = tensor.float() * scale.float()
    return weights
