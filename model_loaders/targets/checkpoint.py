"""A target's checkpoint: where it is, its config, its tokenizer and its weight files.

Everything is refused here that would run a checkpoint's own code.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.utils.hub import cached_file

from model_loaders.errors import CheckpointError, explained
from model_loaders.file_checks import MOST_LAYERS, check_gguf
from model_loaders.files import read_json_object, shown

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SAFETENSORS_NAMES = (_SINGLE, _INDEX)
# Keys of config.json that change what is loaded, each with why it must be absent or null.
_REFUSED_KEYS = {
    "quantization_config": "quantised weights aren't supported; use the checkpoint that they were made from",
    "transformers_weights": "weights are read from model.safetensors or its index only; remove the key",
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint found on disk or on the hub; `folder` exists on disk."""

    source: str  # what transformers is given: a folder or a hub name
    folder: Path
    gguf_file: str | None
    is_hub: bool
    revision: str | None = None  # the hub's commit, so that everything is read from the state that was checked

    @property
    def hub_arguments(self) -> dict[str, Any]:
        """What transformers' from_pretrained needs beside `source` to read this checkpoint's revision."""
        return {"revision": self.revision} if self.is_hub else {}


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
    except Exception as error:
        raise CheckpointError(
            f"{name}: no such folder here and not readable from the hub, expected a checkpoint with "
            f"config.json: {error}"
        ) from error
    assert config_file is not None
    folder = Path(config_file).parent  # .../snapshots/<commit>
    commit = folder.name if re.fullmatch("[0-9a-f]{40}", folder.name) else revision
    return Checkpoint(name, folder, None, True, commit)


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
            f"{folder}: weights only as {', '.join(pickles)}, expected safetensors or GGUF: pickled weights can run "
            "code and are never loaded; convert them with save_pretrained"
        )
    raise CheckpointError(f"{folder}: no weights, expected {' or '.join(_SAFETENSORS_NAMES)} or a .gguf file")


def read_config(found: Checkpoint) -> Any:
    """The transformers config. Raises CheckpointError for one that asks for code of its own, or isn't understood."""
    arguments = found.hub_arguments
    if found.gguf_file:
        require_gguf(found.gguf_file)
        check_gguf(found.folder / found.gguf_file)  # before transformers reads it
        arguments["gguf_file"] = found.gguf_file
    else:
        _refuse_keys(read_json_object(found.folder / "config.json"), found.folder / "config.json")
    with explained(f"{found.source}: config not understood by transformers"):
        return AutoConfig.from_pretrained(found.source, trust_remote_code=False, **arguments)


def _refuse_keys(raw: Mapping[str, Any], path: Path) -> None:
    if "auto_map" in raw:
        value = raw["auto_map"]
        raise CheckpointError(
            f"{path}: auto_map={sorted(value) if isinstance(value, dict) else value!r}, expected no such key: code "
            "shipped with a checkpoint is never run; use a checkpoint of an architecture that transformers has itself"
        )
    kinds = raw.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise CheckpointError(f"{path}: layer_types={shown(kinds)}, expected a list of names, or none")
    for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        if isinstance(raw.get(key), int) and raw[key] > MOST_LAYERS:
            raise CheckpointError(f"{path}: {key}={shown(raw[key])}, expected at most {MOST_LAYERS}")
    for key, reason in _REFUSED_KEYS.items():
        if raw.get(key) is not None:
            raise CheckpointError(f"{path}: {key}={shown(raw[key])}, expected none: {reason}")


def require_gguf(file: str) -> None:
    """Raises CheckpointError, naming `file`, unless the packages that read GGUF are there."""
    missing = [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        raise CheckpointError(
            f"{file}: reading GGUF needs the packages gguf and accelerate, missing {', '.join(missing)}: "
            "pip install specmask[demo]"
        )


def load_tokenizer(found: Checkpoint) -> Any | None:
    """The checkpoint's tokenizer, or None if it has none."""
    arguments = found.hub_arguments
    if found.gguf_file:
        arguments["gguf_file"] = found.gguf_file
    elif not any(_local_file(found, name) for name in TOKENIZER_FILES):
        return None
    with explained(f"{found.source}: tokenizer not loadable"):
        return AutoTokenizer.from_pretrained(found.source, trust_remote_code=False, **arguments)


def weight_files(found: Checkpoint) -> list[Path]:
    """The files that hold the weights, in name order; of a hub checkpoint they are fetched first.

    Raises CheckpointError, before anything opens them, for an index that names other files than the
    folder's *.safetensors (transformers would unpickle them), for files that aren't there, and for adapters.
    """
    if found.gguf_file:
        return [found.folder / found.gguf_file]
    if (adapter := _local_file(found, "adapter_config.json")) is not None:
        raise CheckpointError(f"{adapter}: an adapter's file, expected none: merge the adapter into the weights")
    index = _local_file(found, _INDEX)
    shards = [] if index is None else _index_files(index)
    # transformers prefers the single file where both are there.
    single = _local_file(found, _SINGLE)
    if single is not None:
        return [single]
    if not shards:
        raise CheckpointError(
            f"{found.source}: no weights, expected {' or '.join(_SAFETENSORS_NAMES)}: pickled weights can run code "
            "and are never loaded"
        )
    files = {name: _local_file(found, name) for name in shards}
    if absent := [name for name, path in files.items() if path is None]:
        raise CheckpointError(f"{index}: {absent[0]} is in the index but not there, expected all its files")
    return [path for path in files.values() if path is not None]


def _local_file(found: Checkpoint, name: str) -> Path | None:
    """A file of the checkpoint on disk, fetched from the hub where need be; None where there is none."""
    if not found.is_hub:
        path = found.folder / name
        return path if path.is_file() else None
    with explained(f"{found.source}: {name} not readable from the hub"):
        fetched = cached_file(found.source, name, revision=found.revision, _raise_exceptions_for_missing_entries=False)
        return None if fetched is None else Path(fetched)


def _index_files(index: Path) -> list[str]:
    """The sorted file names of an index, all of them *.safetensors beside it. Raises CheckpointError."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map={shown(weight_map)}, expected an object of tensors and files")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or re.search(r"[/\\]", name):
            raise CheckpointError(
                f"{index}: weight_map has {shown(name)} for {key}, expected the name of a *.safetensors file in the "
                "same folder: other weights can run code and are never loaded"
            )
    return sorted(set(weight_map.values()))
