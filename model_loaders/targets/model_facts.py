"""What architectures say in many ways, or not at all: a model's ends, its decoder layers, what it caches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from model_loaders.errors import CheckpointError


def eos_token_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """Every end id of generation_config, config and tokenizer. Raises CheckpointError for what is no id."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        values = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in values):
            raise CheckpointError(f"{type(source).__name__}: eos_token_id={value!r}, expected an integer or several")
        ids.update(values)
    return frozenset(ids)


def decoder_layers(model: Any, num_layers: int) -> list[nn.Module]:
    """The decoder's layers in order. Raises CheckpointError where they aren't found."""
    decoder = model.get_decoder()
    for attribute in ("layers", "h", "blocks"):
        layers = getattr(decoder, attribute, None)
        if isinstance(layers, nn.ModuleList) and len(layers) >= num_layers:
            return list(layers)
    raise CheckpointError(
        f"{type(model).__name__}: no list of {num_layers} decoder layers found, expected one named layers, h or blocks"
    )


class Probed(NamedTuple):
    """What a forward of one token shows: what every layer caches of it, and the logits' dtype."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    logits_dtype: torch.dtype


@torch.inference_mode()
def probe(model: Any, num_layers: int, cache_argument: str, name: str) -> Probed:
    """Runs one token, because configs name these in many ways.

    cache_argument: the name under which the model takes a cache.

    Raises CheckpointError, naming `name`, unless all layers keep keys and values of one shape, and for logits with NaN.
    """
    cache = _ProbeCache()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    output = model(
        input_ids=zero,
        position_ids=zero,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device),
        use_cache=True,
        **{cache_argument: cache},
    )
    if sorted(cache.shapes) != list(range(num_layers)):
        raise CheckpointError(
            f"{name}: {len(cache.shapes)} of {num_layers} layers keep keys and values, expected all: "
            "layers that share or recur can't be represented by the per-row cache"
        )
    if output.logits.isnan().any():
        raise CheckpointError(
            f"{name}: the logits of one token are NaN in {model.dtype}, expected numbers: a weight or a number "
            "of config.json isn't finite"
        )
    shapes = set(cache.shapes.values())
    if len(shapes) != 1:
        raise CheckpointError(f"{name}: layers with different attention shapes {sorted(shapes)}, expected one shape")
    return Probed(*shapes.pop(), output.logits.dtype)


class _ProbeCache(Cache):
    """Holds nothing; notes each layer's (kv_heads, key width, value width)."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states
