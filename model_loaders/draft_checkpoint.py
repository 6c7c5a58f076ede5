"""Draft checkpoints: z-lab's public DFlash format, read and written.

A checkpoint is a folder with ``config.json`` (a Qwen3 configuration with a ``dflash_config`` object) and
``*.safetensors`` files. Keys are read from ``dflash_config`` first, then from the top level. Whatever can't
be placed is refused by name: a missing, unexpected or misshapen tensor, a target of another size, an option
that this version doesn't implement. A wrong draft would still give exact samples, only slowly, so a check at
loading is the only place where such a mistake shows.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from model_loaders.dflash import FULL, SLIDING, DFlashConfig, DFlashDraft, DFlashModule
from model_loaders.errors import CheckpointError
from model_loaders.packed_linear import pack_linears
from model_loaders.target_checkpoint import explained, other_dtypes, read_json_object, refuse_other_dtypes

DEMO_DRAFT = Path(__file__).parent / "demo_draft"

ARCHITECTURE = "DFlashDraftModel"

# Options whose maths this version lacks, each with the value that means "off".
NOT_IMPLEMENTED: dict[str, Any] = {
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "conv_kernel_size": None,
    "conv_group_size": None,
    "selector_rank": None,
    "selector_top_k": None,
    "markov_rank": 0,
    "enable_confidence_head": False,
    "sample_from_anchor": False,
    "draft_vocab_size": None,
    "mlp_bias": False,
    "quantization_config": None,
}
# Keys of dflash_config that have no influence on inference.
IGNORED = {"num_anchors", "markov_head_type", "confidence_head_with_markov"}
READ = {"target_layer_ids", "mask_token_id", "mask_token", "block_size", "num_target_layers", "causal"}
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


def load_draft(name: str | Path, target: Any, *, revision: str | None = None) -> DFlashDraft:
    """The draft `name` on the target's device and in its dtype, checked against the target.

    name: "demo" (the draft shipped for the demo target), a local folder, or a hub name. revision: a hub
    branch, tag or commit. Raises CheckpointError for anything that doesn't fit.
    """
    name = str(name)
    with explained(f"draft={name!r}: not usable as a draft"):
        folder, revision = _find(name, revision)
        config = read_config(folder, target)
        files = tuple(sorted(folder.glob("*.safetensors")))
        with explained(f"{folder / 'config.json'}: no draft can be made by it"):
            module = DFlashModule(config)
        _place(module, _read_tensors(folder, files))
        module.to(device=target.device, dtype=target.dtype).requires_grad_(False).eval()
        _refuse_not_finite(module, folder)
        if target.device.type == "cpu":
            pack_linears(module)
    return DFlashDraft(module, target, name=name, revision=revision, files=files)


def save_draft(folder: str | os.PathLike[str], draft: DFlashDraft, *, dtype: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors so that load_draft reads them back.

    dtype: of the stored tensors; None keeps the draft's own. Each file appears whole or not at all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or draft.dtype
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in draft.module.state_dict().items()
    }
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")
    part = folder / "config.json.part"
    part.write_text(json.dumps(config_to_json(draft.config, dtype), indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / "config.json")


def config_to_json(config: DFlashConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration in z-lab's format: a Qwen3 configuration with a `dflash_config` object."""
    rope = dict(config.rope)
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
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
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
    }
    if config.vocab_size is not None:
        out["vocab_size"] = config.vocab_size
    if config.causal is not None:
        out["dflash_config"]["causal"] = config.causal
    return out


def default_layer_ids(num_draft_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """z-lab's rule for which target layers feed a draft: evenly spread, clear of both ends."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def read_config(folder: Path, target: Any) -> DFlashConfig:
    """The DFlashConfig of a checkpoint folder, checked against the target. Raises CheckpointError."""
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; a draft folder needs config.json and *.safetensors")
    raw = read_json_object(path)
    nested = raw.get("dflash_config")
    if nested is None:
        nested = {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: dflash_config={nested!r}, expected an object")
    _refuse_other_methods(raw, path)
    _refuse_unknown_options(raw, nested, path)

    def option(key: str) -> Any:
        value = nested.get(key)
        return raw.get(key) if value is None else value

    def number(key: str, lowest: int = 1) -> int:
        return _integer(key, option(key), path, lowest)

    def number_or(key: str, default: Any, lowest: int = 1) -> Any:
        return default if option(key) is None else number(key, lowest)

    heads, kv_heads = number("num_attention_heads"), number("num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(f"{path}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{path}: hidden_act={act!r}, expected 'silu'; this version has no other")
    num_layers, hidden_size = number("num_hidden_layers"), number("hidden_size")
    head_dim = number_or("head_dim", hidden_size // heads)
    if head_dim % 2 or head_dim < 2:
        raise CheckpointError(f"{path}: head_dim={head_dim}, expected an even integer of at least 2")
    layer_types = _layer_types(raw, num_layers, path)
    is_causal = _flag("is_causal", raw.get("is_causal"), path)
    causal = _flag("causal", nested.get("causal"), path)
    eps = raw.get("rms_norm_eps", 1e-6)
    config = DFlashConfig(
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        layer_types=layer_types,
        target_layer_ids=_layer_ids(option("target_layer_ids"), num_layers, target, path),
        num_target_layers=number_or("num_target_layers", target.num_layers),
        block_size=number("block_size", 2),
        mask_token_id=_mask_token_id(option("mask_token_id"), option("mask_token"), target, path),
        rope=_rope(raw, path),
        max_position_embeddings=number_or("max_position_embeddings", 32768),
        sliding_window=number("sliding_window") if SLIDING in layer_types else None,
        causal=causal if "causal" in nested else is_causal,
        rms_norm_eps=_positive("rms_norm_eps", eps, path),
        attention_bias=bool(_flag("attention_bias", raw.get("attention_bias"), path)),
        vocab_size=number_or("vocab_size", None),
    )
    _check_target(config, target, path)
    return config


def _integer(key: str, value: Any, path: Path, lowest: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise CheckpointError(f"{path}: {key}={value!r}, expected an integer of at least {lowest}")
    return value


def _flag(key: str, value: Any, path: Path) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{path}: {key}={value!r}, expected true, false or null")
    return value


def _positive(key: str, value: Any, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{path}: {key}={value!r}, expected a positive number")
    return float(value)


def _find(name: str, revision: str | None) -> tuple[Path, str | None]:
    """The local folder of a draft, and its revision (the hub's commit for a hub name)."""
    if name == "demo":
        return DEMO_DRAFT, None
    if (folder := Path(name).expanduser()).is_dir():
        return folder, revision
    if folder.is_absolute() or name.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise CheckpointError(f"draft={name!r}: no such folder; expected 'demo', a folder or a hub name")
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "config.json"]))
    except Exception as error:
        raise CheckpointError(
            f"draft={name!r}, revision={revision!r}: no such folder, and the hub gave no snapshot ({error}); "
            "check the name, or download it and pass the folder"
        ) from error
    return found, found.name


def _refuse_other_methods(raw: dict[str, Any], path: Path) -> None:
    for key in ("speculators_model_type", "speculators_config"):
        if key in raw:
            raise CheckpointError(
                f"{path}: {key}={raw[key]!r} marks the speculators format, expected {ARCHITECTURE}; "
                "this version doesn't read it"
            )
    architectures = raw.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE]:
        raise CheckpointError(
            f"{path}: architectures={architectures!r}, expected [{ARCHITECTURE!r}]; "
            "this version loads no DFlash 2, DSpark or other draft"
        )


def _refuse_unknown_options(raw: dict[str, Any], nested: dict[str, Any], path: Path) -> None:
    for place, values in (("", raw), ("dflash_config.", nested)):
        for key, off in NOT_IMPLEMENTED.items():
            value = values.get(key)
            if value is None or value == off or (key == "draft_vocab_size" and value == raw.get("vocab_size")):
                continue
            raise CheckpointError(
                f"{path}: {place}{key}={value!r}, expected {off!r}; this version doesn't implement it"
            )
    for key in sorted(nested.keys() - READ - IGNORED - NOT_IMPLEMENTED.keys()):
        warnings.warn(f"{path}: dflash_config.{key}={nested[key]!r} is not known and has no effect", stacklevel=4)


def _layer_types(raw: dict[str, Any], num_layers: int, path: Path) -> tuple[str, ...]:
    kinds = raw.get("layer_types")
    if kinds is None:
        if _flag("use_sliding_window", raw.get("use_sliding_window"), path) and raw.get("sliding_window"):
            first = _integer("max_window_layers", raw.get("max_window_layers", 28), path, 0)  # 28: Qwen3's default
            kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
        else:
            kinds = [FULL] * num_layers
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"{path}: layer_types={kinds!r}, expected a list of {FULL!r} or {SLIDING!r}")
    if len(kinds) != num_layers:
        raise CheckpointError(f"{path}: layer_types has {len(kinds)} entries, num_hidden_layers={num_layers}")
    if wrong := set(kinds) - {FULL, SLIDING}:
        raise CheckpointError(f"{path}: layer_types holds {sorted(wrong)!r}, expected {FULL!r} or {SLIDING!r}")
    return tuple(kinds)


def _layer_ids(ids: Any, num_layers: int, target: Any, path: Path) -> tuple[int, ...]:
    if ids is None:
        ids = default_layer_ids(num_layers, target.num_layers)
        warnings.warn(
            f"{path} names no target_layer_ids; using {list(ids)} by the usual rule. A draft trained on "
            "other layers will load and propose badly: set dflash_config.target_layer_ids to its own",
            stacklevel=4,
        )
    # -1 is the embedding. The last layer is out: transformers' entry for it is normed, a hook's is not.
    last = target.num_layers - 2
    if not isinstance(ids, list | tuple):
        raise CheckpointError(f"{path}: target_layer_ids={ids!r}, expected a list of the target's layers")
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or not -1 <= i <= last for i in ids):
        raise CheckpointError(
            f"{path}: target_layer_ids={ids!r}, expected layers from -1 (the embedding) to {last} "
            f"of the target's {target.num_layers}; is it a draft for another target?"
        )
    if len(set(ids)) != len(ids):
        raise CheckpointError(f"{path}: target_layer_ids={ids!r}, expected distinct layers")
    return tuple(ids)


def _mask_token_id(token_id: Any, token: Any, target: Any, path: Path) -> int:
    if token_id is None and isinstance(token, str):
        tokenizer = getattr(target, "tokenizer", None)
        token_id = tokenizer.get_vocab().get(token) if tokenizer is not None else None
        if token_id is None:
            raise CheckpointError(f"{path}: mask_token={token!r} is not in the target's vocabulary; set mask_token_id")
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < target.vocab_size:
        raise CheckpointError(
            f"{path}: mask_token_id={token_id!r}, expected an id below the target's vocabulary of "
            f"{target.vocab_size}; is it a draft for another target?"
        )
    return token_id


def _rope(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """rope_parameters of either style: nested (rope_parameters) or top-level (rope_theta, rope_scaling)."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        values = raw.get(key)
        if values is not None and not isinstance(values, dict):
            raise CheckpointError(f"{path}: {key}={values!r}, expected an object or null")
        rope |= values or {}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    # The draft rotates whole heads at plain positions, whatever its target does.
    rope.pop("partial_rotary_factor", None)
    for key in [key for key in rope if key.startswith("mrope_")]:
        del rope[key]
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = raw.get("rope_theta")
    rope["rope_theta"] = _positive("rope_theta", rope["rope_theta"], path)
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"{path}: rope_type={kind!r}, expected one of {ROPE_TYPES}")
    for key, optional in ROPE_NUMBERS[kind].items():
        if not optional and rope.get(key) is None:
            raise CheckpointError(f"{path}: rope_type={kind!r} without a {key}; add rope_scaling.{key}")
        # An mscale of 0 is off.
        if rope.get(key) is not None and not (key.startswith("mscale") and rope[key] == 0):
            _positive(f"rope_scaling.{key}", rope[key], path)
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise CheckpointError(
            f"{path}: rope_scaling.high_freq_factor={rope['high_freq_factor']!r}, expected more than "
            f"low_freq_factor={rope['low_freq_factor']!r}"
        )
    if kind == "yarn":
        _flag("rope_scaling.truncate", rope.get("truncate"), path)
    if kind in ("yarn", "llama3"):
        length = "original_max_position_embeddings"
        if rope.get(length) is None:
            # The usual convention: without it, max_position_embeddings is the length before scaling.
            rope[length] = raw.get("max_position_embeddings") or 32768
        _integer(f"rope_scaling.{length}", rope[length], path)
    return rope


def _check_target(config: DFlashConfig, target: Any, path: Path) -> None:
    pairs = [
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ]
    if config.vocab_size is not None:
        pairs.append(("vocab_size", config.vocab_size, target.vocab_size))
    for key, found, wanted in pairs:
        if found != wanted:
            raise CheckpointError(
                f"{path}: {key}={found}, but the target has {wanted}; load the draft with its own target"
            )


def _read_tensors(folder: Path, files: tuple[Path, ...]) -> dict[str, Tensor]:
    """All tensors of the files under the module's names: no `model.` prefix. Raises CheckpointError."""
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors; other weight formats are not read")
    refuse_other_dtypes(other_dtypes(files))
    tensors: dict[str, Tensor] = {}
    for path in files:
        with explained(f"{path} can't be read"), safe_open(path, framework="pt") as stream:
            for key in stream.keys():  # noqa: SIM118 (not a dict)
                name = key.removeprefix("model.")
                if name in tensors:
                    raise CheckpointError(f"{path}: tensor {key} occurs twice; keep one copy")
                tensors[name] = stream.get_tensor(key)
    return tensors


def _place(module: DFlashModule, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors into the module; each must have its place and shape. Raises CheckpointError."""
    config, wanted = module.config, module.state_dict()
    head = config.head_dim
    rows = [config.num_attention_heads * head] + 2 * [config.num_key_value_heads * head]
    for name in [name for name in tensors if ".qkv_proj." in name]:
        fused = tensors.pop(name)
        found = fused.shape[0] if fused.ndim else 0
        if found != sum(rows):
            raise CheckpointError(f"tensor {name} has {found} rows, expected {sum(rows)} (q, k and v)")
        for part, piece in zip("qkv", fused.split(rows), strict=True):
            own = name.replace("qkv_proj", f"{part}_proj")
            if own in tensors:
                raise CheckpointError(f"tensor {own} occurs twice, also as a part of {name}; keep one copy")
            tensors[own] = piece
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise CheckpointError(f"tensors missing from the checkpoint: {_some(missing)}; fetch all its files")
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise CheckpointError(
            f"tensors that a DFlash draft with this configuration has no place for: {_some(extra)}; "
            "another method's draft, or a config.json that isn't the weights' own"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(tensor.shape)}, expected {list(wanted[name].shape)} by config.json"
            )
    module.load_state_dict(tensors)


def _refuse_not_finite(module: DFlashModule, folder: Path) -> None:
    """Raise CheckpointError for a weight, or a rotation's frequency, that is NaN or infinite in its dtype."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{folder}: tensor {name} has NaN or infinite values as {tensor.dtype}, expected finite ones"
            )


def _some(names: list[str]) -> str:
    """The names, the first eight if there are many."""
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
