"""Checked values of a draft's config.json, and the part of it that every layout shares.

Each message names the file, the key and the value found, and what is expected.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from model_loaders.drafts.backbone import FULL, SLIDING, DraftConfig
from model_loaders.errors import CheckpointError
from model_loaders.file_checks import MOST_LAYERS

# Scalings whose frequencies don't depend on the length reached: keys already cached must stay valid.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
# Numbers of a scaling, each with whether the type of scaling can do without it.
ROPE_NUMBERS: dict[str, dict[str, bool]] = {
    "default": {},
    "linear": {"factor": False},
    "yarn": {
        "factor": False,
        "attention_factor": True,
        "beta_fast": True,
        "beta_slow": True,
        "mscale": True,
        "mscale_all_dim": True,
    },
    "llama3": {"factor": False, "low_freq_factor": False, "high_freq_factor": False},
}
# Options whose maths no layout's reader has, each with the value that means "off".
NOT_IMPLEMENTED: dict[str, Any] = {
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "mlp_bias": False,
    "quantization_config": None,
}


class Values:
    """A config.json: keys are looked up in the nested objects, first to last, then at the top level.

    path: for messages. raw: the object. nested: the names of the objects within it.
    """

    def __init__(self, path: Path, raw: dict[str, Any], *nested: str):
        self.path, self.raw = path, raw
        self.nested: dict[str, dict[str, Any]] = {}
        for name in nested:
            value = raw.get(name)
            if value is not None and not isinstance(value, dict):
                raise CheckpointError(f"{path}: {name}={value!r}, expected an object")
            self.nested[name] = value or {}

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is absent or null."""
        for values in (*self.nested.values(), self.raw):
            if values.get(key) is not None:
                return values[key]
        return default

    def shown(self, key: str) -> str:
        """What a message has behind `key=`."""
        return "missing" if self.get(key) is None else repr(self.get(key))

    def integer(self, key: str, lowest: int = 1) -> int:
        """An integer of at least `lowest`."""
        return self.checked_integer(key, self.get(key), lowest)

    def integer_or(self, key: str, default: Any, lowest: int = 1) -> Any:
        """The same, or the default where the key is absent."""
        return default if self.get(key) is None else self.integer(key, lowest)

    def checked_integer(self, key: str, value: Any, lowest: int = 1) -> int:
        """The value under the key's name."""
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise self.error(f"{key}={value!r}, expected an integer of at least {lowest}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false, or the default where the key is absent."""
        value = self.checked_flag(key, self.get(key))
        return default if value is None else value

    def checked_flag(self, key: str, value: Any) -> bool | None:
        """The value under the key's name."""
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key}={value!r}, expected true, false or null")
        return value

    def positive(self, key: str, default: Any = None) -> float:
        """A positive number."""
        return self.checked_positive(key, self.get(key, default))

    def checked_positive(self, key: str, value: Any) -> float:
        """The value under the key's name."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{key}={value!r}, expected a positive number")
        return float(value)

    def error(self, text: str) -> CheckpointError:
        """The error to raise, with the file's name before the text."""
        return CheckpointError(f"{self.path}: {text}")

    def refuse_options(self, options: Mapping[str, Any]) -> None:
        """Raise CheckpointError for an option whose value isn't the one given, absent or null."""
        places = [("", self.raw), *((f"{name}.", values) for name, values in self.nested.items())]
        for place, values in places:
            for key, off in options.items():
                value = values.get(key)
                if value is not None and value != off:
                    raise self.error(f"{place}{key}={value!r}, expected {off!r}; this version doesn't implement it")

    def warn_unknown(self, known: Collection[str]) -> None:
        """Warn of keys in the nested objects that have no effect here."""
        for name, values in self.nested.items():
            for key in sorted(values.keys() - known):
                warnings.warn(f"{self.path}: {name}.{key}={values[key]!r} is not known and has no effect", stacklevel=5)


def shared_fields(values: Values, target: Any) -> dict[str, Any]:
    """The fields of DraftConfig that every layout reads the same way, checked against the target."""
    heads, kv_heads = values.integer("num_attention_heads"), values.integer("num_key_value_heads")
    if heads % kv_heads:
        raise values.error(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if (act := values.raw.get("hidden_act", "silu")) != "silu":
        raise values.error(f"hidden_act={act!r}, expected 'silu'; this version has no other")
    num_layers, hidden_size = values.integer("num_hidden_layers"), values.integer("hidden_size")
    head_dim = values.integer_or("head_dim", hidden_size // heads)
    if head_dim % 2 or head_dim < 2:
        raise values.error(f"head_dim={head_dim}, expected an even integer of at least 2")
    if num_layers > MOST_LAYERS:
        raise values.error(f"num_hidden_layers={num_layers}, expected at most {MOST_LAYERS}")
    layer_types = _layer_types(values, num_layers)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": values.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "layer_types": layer_types,
        "num_target_layers": values.integer_or("num_target_layers", target.num_layers),
        "rope": _rope(values),
        "max_position_embeddings": values.integer_or("max_position_embeddings", 32768),
        "sliding_window": values.integer("sliding_window") if SLIDING in layer_types else None,
        "rms_norm_eps": values.checked_positive("rms_norm_eps", values.raw.get("rms_norm_eps", 1e-6)),
        "attention_bias": values.flag("attention_bias"),
        "vocab_size": values.integer_or("vocab_size", None),
    }


def layer_ids(values: Values, key: str, ids: Any, target: Any, offset: int = 0) -> tuple[int, ...]:
    """Distinct layers of the target, from the checkpoint's own numbers, which are `offset` higher."""
    # -1 is the embedding. The last layer is out: transformers' entry for it is normed, a hook's is not.
    first, last = offset - 1, target.num_layers - 2 + offset
    if not isinstance(ids, list | tuple):
        raise values.error(f"{key}={ids!r}, expected a list of the target's layers")
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or not first <= i <= last for i in ids):
        raise values.error(
            f"{key}={ids!r}, expected layers from {first} (the embedding) to {last} "
            f"of the target's {target.num_layers}; is it a draft for another target?"
        )
    if len(set(ids)) != len(ids):
        raise values.error(f"{key}={ids!r}, expected distinct layers")
    return tuple(i - offset for i in ids)


def target_layer_ids(values: Values, target: Any, default: Callable[[int, int], tuple[int, ...]]) -> tuple[int, ...]:
    """`target_layer_ids`, or the default of (draft's layers, target's layers) with a warning."""
    ids = values.get("target_layer_ids")
    if ids is None:
        ids = default(values.integer("num_hidden_layers"), target.num_layers)
        warnings.warn(
            f"{values.path} names no target_layer_ids; using {list(ids)} by the usual rule. A draft trained on "
            "other layers will load and propose badly: set dflash_config.target_layer_ids to its own",
            stacklevel=5,
        )
    return layer_ids(values, "target_layer_ids", ids, target)


def mask_token_id(values: Values, target: Any) -> int:
    """`mask_token_id`, or the id of `mask_token` in the target's vocabulary."""
    token_id, token = values.get("mask_token_id"), values.get("mask_token")
    if token_id is None and isinstance(token, str):
        tokenizer = getattr(target, "tokenizer", None)
        token_id = tokenizer.get_vocab().get(token) if tokenizer is not None else None
        if token_id is None:
            raise values.error(f"mask_token={token!r} is not in the target's vocabulary; set mask_token_id")
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < target.vocab_size:
        raise values.error(
            f"mask_token_id={values.shown('mask_token_id')}, expected an id below the target's vocabulary of "
            f"{target.vocab_size}; is it a draft for another target?"
        )
    return token_id


def check_target(values: Values, config: DraftConfig, target: Any) -> None:
    """Raise CheckpointError unless the draft was made for a target of these sizes."""
    pairs = [
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ]
    if config.vocab_size is not None:
        pairs.append(("vocab_size", config.vocab_size, target.vocab_size))
    for key, found, wanted in pairs:
        if found != wanted:
            raise values.error(f"{key}={found}, but the target has {wanted}; load the draft with its own target")
    if config.block_size > config.max_position_embeddings:
        raise values.error(
            f"block_size={config.block_size}, expected at most max_position_embeddings={config.max_position_embeddings}"
        )


def check_presence(values: Values, key: str, wanted: bool, tensor: str, names: Collection[str]) -> None:
    """Raise CheckpointError unless the weights hold `tensor` exactly where the configuration wants it."""
    shown = values.shown(key)
    if wanted and tensor not in names:
        raise values.error(
            f"{key}={shown}, but the weights hold no tensor {tensor}; fetch all files, or the config.json that "
            "belongs to them"
        )
    if not wanted and tensor in names:
        raise values.error(f"{key}={shown}, but the weights hold a tensor {tensor}; is config.json the weights' own?")


def _layer_types(values: Values, num_layers: int) -> tuple[str, ...]:
    kinds = values.raw.get("layer_types")
    if kinds is None:
        sliding = values.checked_flag("use_sliding_window", values.raw.get("use_sliding_window"))
        if sliding and values.raw.get("sliding_window"):
            # 28: Qwen3's default
            first = values.checked_integer("max_window_layers", values.raw.get("max_window_layers", 28), 0)
            kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
        else:
            kinds = [FULL] * num_layers
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise values.error(f"layer_types={kinds!r}, expected a list of {FULL!r} or {SLIDING!r}")
    if len(kinds) != num_layers:
        raise values.error(f"layer_types has {len(kinds)} entries, num_hidden_layers={num_layers}")
    if wrong := set(kinds) - {FULL, SLIDING}:
        raise values.error(f"layer_types holds {sorted(wrong)!r}, expected {FULL!r} or {SLIDING!r}")
    return tuple(kinds)


def _rope(values: Values) -> dict[str, Any]:
    """rope_parameters of either style: nested (rope_parameters) or top-level (rope_theta, rope_scaling)."""
    raw = values.raw
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        found = raw.get(key)
        if found is not None and not isinstance(found, dict):
            raise values.error(f"{key}={found!r}, expected an object or null")
        rope |= found or {}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    # The draft rotates whole heads at plain positions, whatever its target does.
    rope.pop("partial_rotary_factor", None)
    for key in [key for key in rope if key.startswith("mrope_")]:
        del rope[key]
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = raw.get("rope_theta")
    rope["rope_theta"] = values.checked_positive("rope_theta", rope["rope_theta"])
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise values.error(f"rope_type={kind!r}, expected one of {ROPE_TYPES}")
    for key, optional in ROPE_NUMBERS[kind].items():
        if not optional and rope.get(key) is None:
            raise values.error(f"rope_type={kind!r} without a {key}; add rope_scaling.{key}")
        # An mscale of 0 is off.
        if rope.get(key) is not None and not (key.startswith("mscale") and rope[key] == 0):
            values.checked_positive(f"rope_scaling.{key}", rope[key])
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise values.error(
            f"rope_scaling.high_freq_factor={rope['high_freq_factor']!r}, expected more than "
            f"low_freq_factor={rope['low_freq_factor']!r}"
        )
    if kind == "yarn":
        values.checked_flag("rope_scaling.truncate", rope.get("truncate"))
    if kind in ("yarn", "llama3"):
        length = "original_max_position_embeddings"
        if rope.get(length) is None:
            # The usual convention: without it, max_position_embeddings is the length before scaling.
            rope[length] = raw.get("max_position_embeddings") or 32768
        values.checked_integer(f"rope_scaling.{length}", rope[length])
    return rope


def qwen3_json(config: DraftConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """What every written layout shares: a Qwen3 configuration."""
    rope = dict(config.rope)
    out: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": None if rope.get("rope_type") == "default" else rope,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
    }
    if config.vocab_size is not None:
        out["vocab_size"] = config.vocab_size
    return out
