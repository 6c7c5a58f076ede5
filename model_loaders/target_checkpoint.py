"""A target's checkpoint: where it is, whether it can be served, and its files.

Everything is refused here that the per-row cache can't represent or that would run a checkpoint's own code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.utils.hub import cached_file

from model_loaders.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
)
_SAFETENSORS_NAMES = ("model.safetensors", "model.safetensors.index.json")
# transformers' names of a layer that attends to everything before it.
_FULL_ATTENTION = {"full_attention", "attention"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint found on disk or on the hub; `folder` exists on disk."""

    source: str  # what transformers is given: a folder or a hub name
    folder: Path
    gguf_file: str | None
    is_hub: bool


def find_checkpoint(name: str, revision: str | None) -> Checkpoint:
    """Where the weights are: a .gguf file, a folder, or a hub name. Raises CheckpointError if nowhere, or pickled."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{name}: a {path.suffix or 'plain'} file, expected a .gguf file or a folder")
        return Checkpoint(str(path.parent), path.parent, path.name, False)
    if path.is_dir():
        return _find_in_folder(path)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(f"{name}: no such file or folder, expected 'demo', a hub name, a folder or a .gguf file")
    try:
        config_file = cached_file(name, "config.json", revision=revision)
    except OSError as error:
        raise CheckpointError(
            f"{name}: no such folder here and not readable from the hub, expected a checkpoint with "
            f"config.json: {error}"
        ) from error
    assert config_file is not None
    return Checkpoint(name, Path(config_file).parent, None, True)


def _find_in_folder(folder: Path) -> Checkpoint:
    files = sorted(p.name for p in folder.iterdir())
    ggufs = [f for f in files if f.endswith(".gguf")]
    if any(f in files for f in _SAFETENSORS_NAMES):
        if "config.json" not in files:
            raise CheckpointError(f"{folder}: no config.json beside the safetensors, expected one")
        return Checkpoint(str(folder), folder, None, False)
    if len(ggufs) == 1:
        return Checkpoint(str(folder), folder, ggufs[0], False)
    if ggufs:
        raise CheckpointError(f"{folder}: {len(ggufs)} GGUF files ({', '.join(ggufs)}), expected one: name the file")
    pickles = [f for f in files if f.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise CheckpointError(
            f"{folder}: weights only as {', '.join(pickles)}, expected safetensors or GGUF: pickled weights "
            "can run "
            "code and are never loaded; convert them with save_pretrained"
        )
    raise CheckpointError(f"{folder}: no weights, expected {' or '.join(_SAFETENSORS_NAMES)} or a .gguf file")


def read_config(found: Checkpoint, revision: str | None) -> Any:
    """The transformers config. Raises CheckpointError for one that asks for code of its own, or isn't understood."""
    arguments: dict[str, Any] = {"revision": revision} if found.is_hub else {}
    if found.gguf_file:
        require_gguf(found.gguf_file)
        arguments["gguf_file"] = found.gguf_file
    else:
        raw, _ = PretrainedConfig.get_config_dict(found.source, **arguments)
        if "auto_map" in raw:
            raise CheckpointError(
                f"{found.source}: config.json has auto_map={sorted(raw['auto_map'])}, expected none: code "
                "shipped with "
                "a checkpoint is never run; use a checkpoint of an architecture that transformers has itself"
            )
    try:
        return AutoConfig.from_pretrained(found.source, trust_remote_code=False, **arguments)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{found.source}: config not understood by transformers: {error}") from error


def require_gguf(file: str) -> None:
    """Raises CheckpointError, naming `file`, unless the packages that read GGUF are there."""
    missing = [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        raise CheckpointError(
            f"{file}: reading GGUF needs the packages gguf and accelerate, missing {', '.join(missing)}: "
            "pip install specmask[demo]"
        )


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
            f"{kind}: layer_types has {', '.join(other)}, expected full_attention only: the per-row cache "
            "can't "
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
            f"{kind}: rope_type={rope_type!r}, expected one that depends on the position alone: with this "
            "one a row's "
            "rotation depends on the longest row of its batch"
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
                f"{name}: {kind} tensors {listed}, expected {expected}: the checkpoint is incomplete or of "
                "another "
                "architecture than its config says"
            )
    if info.get("error_msgs"):
        raise CheckpointError(f"{name}: {info['error_msgs'][0]}")


def load_tokenizer(found: Checkpoint, revision: str | None) -> Any | None:
    """The checkpoint's tokenizer, or None if it has none."""
    arguments: dict[str, Any] = {"revision": revision} if found.is_hub else {}
    if found.gguf_file:
        arguments["gguf_file"] = found.gguf_file
    elif found.is_hub:
        paths = (
            cached_file(found.source, f, revision=revision, _raise_exceptions_for_missing_entries=False)
            for f in TOKENIZER_FILES
        )
        if not any(paths):
            return None
    elif not any((found.folder / f).exists() for f in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(found.source, trust_remote_code=False, **arguments)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"{found.source}: tokenizer not loadable: {error}") from error


def weight_files(found: Checkpoint) -> list[Path]:
    """The files that hold the weights, in name order."""
    if found.gguf_file:
        return [found.folder / found.gguf_file]
    single = found.folder / "model.safetensors"
    return [single] if single.exists() else sorted(found.folder.glob("model-*.safetensors"))
