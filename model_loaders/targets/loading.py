"""Loading a target with every tensor accounted for."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from model_loaders.errors import CheckpointError, explained
from model_loaders.file_checks import num_elements, other_dtypes, refuse_larger_model, refuse_other_dtypes
from model_loaders.layers.attention import ATTENTION
from model_loaders.layers.fused_norm import fuse_norms
from model_loaders.layers.packed_linear import pack_linears
from model_loaders.targets.checkpoint import Checkpoint, find_checkpoint, load_tokenizer, read_config, weight_files
from model_loaders.targets.demo import demo_target_folder
from model_loaders.targets.refusals import refuse_unsupported, refuse_wrong_tensors
from model_loaders.targets.target import Target


def load_target(
    name: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
) -> Target:
    """Loads a target: "demo", a hub name, a folder with safetensors, a .gguf file or a folder with one.

    Args:
        device: "auto" is CUDA where there is one, else the CPU.
        dtype: "auto" is bfloat16 on CUDA, float32 on the CPU.
        revision: a hub branch, tag or commit.

    Safetensors and GGUF only, and no code from a checkpoint is ever run. Raises CheckpointError for a
    checkpoint that isn't found, has other files, has missing, unexpected or misshapen tensors, or is of an
    architecture that the per-row cache can't represent: sliding or chunked windows, recurrent layers,
    attention sinks, soft-capped attention, length-dependent rotary scaling, encoder-decoders, multimodal
    models.
    """
    asked = str(name)
    if asked == "demo":
        name = demo_target_folder()
    device = _resolve_device(device)
    dtype = _resolve_dtype(dtype, device)
    with explained(f"{asked}: not usable as a target"):
        found = find_checkpoint(str(name), revision)
        config = read_config(found)
        refuse_unsupported(config, asked)
        files = weight_files(found)
        with explained(f"{asked}: not loadable by transformers as a causal language model"):
            refuse_larger_model(
                lambda: AutoModelForCausalLM.from_config(config, trust_remote_code=False), num_elements(files), asked
            )
        model = _load_model(found, files, config, device, dtype, asked)
        return Target(
            model,
            load_tokenizer(found),
            name=asked,
            revision=found.revision,
            weight_files=files,
        )


def _resolve_device(device: str | torch.device) -> torch.device:
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}, expected 'auto', 'cpu' or 'cuda[:index]'") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, expected 'auto' or 'cpu': torch sees no CUDA device here")
    return found


def _resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    if found is None:
        raise ValueError(f"dtype={dtype!r}, expected 'auto', 'float32', 'bfloat16' or 'float16'")
    return found


def _load_model(
    found: Checkpoint, files: Sequence[Path], config: Any, device: torch.device, dtype: torch.dtype, name: str
) -> Any:
    arguments = found.hub_arguments
    if found.gguf_file:
        arguments["gguf_file"] = found.gguf_file
    else:
        arguments["use_safetensors"] = True
    if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        arguments["device_map"] = {"": device}  # straight to the device, without a copy in host memory
    others = {} if found.gguf_file else other_dtypes(files)
    with explained(f"{name}: not loadable by transformers as a causal language model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            found.source,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, with our message
            **arguments,
        )
    model, info = loaded
    refuse_other_dtypes({key: value for key, value in others.items() if not _is_skipped(model, key)})
    refuse_wrong_tensors(info, name)
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
        raise CheckpointError(
            f"{name}: {type(model).__name__}, expected a model whose attention goes through transformers' attention "
            "interface and whose only state is keys and values"
        )
    model.set_attn_implementation(ATTENTION)
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        pack_linears(model)
    fuse_norms(model)
    return model


def _is_skipped(model: Any, key: str) -> bool:
    """Whether a checkpoint's tensor is one of those, masks of older checkpoints, that the model doesn't load."""
    own = model.state_dict().keys()
    if key in own or f"{model.base_model_prefix}.{key}" in own:
        return False
    return any(re.search(pattern, key) for pattern in model._keys_to_ignore_on_load_unexpected or ())
