"""Draft checkpoints: read in whatever published layout they have, and written; finding.py finds them.

A checkpoint is a folder with ``config.json`` and ``*.safetensors`` files. Whatever can't be placed is refused by name:
a missing, unexpected or misshapen tensor, a target of another size, an option that this version doesn't implement.
A wrong draft would still give exact samples, only slowly, so a check at loading is the only place where such a
mistake shows.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from model_loaders.drafts import row_scaled
from model_loaders.drafts.backbone import Backbone, DraftConfig
from model_loaders.drafts.block_draft import BlockDraft
from model_loaders.drafts.dflash import DFlashDraft
from model_loaders.drafts.dflash2 import DFlash2Config, DFlash2Draft, DFlash2Module
from model_loaders.drafts.dspark import DSparkConfig, DSparkDraft, DSparkModule
from model_loaders.drafts.finding import FoundDraft, find_draft, tensor_names
from model_loaders.drafts.formats import deepspec, specforge, speculators, zlab
from model_loaders.drafts.whole import whole_tensors
from model_loaders.errors import CheckpointError, explained
from model_loaders.file_checks import num_elements, other_dtypes, refuse_larger_model, refuse_other_dtypes
from model_loaders.layers.packed_linear import pack_linears

# A configuration's class says which method it is: its module and its draft.
METHODS: dict[type[DraftConfig], tuple[Any, type[BlockDraft]]] = {
    DraftConfig: (Backbone, DFlashDraft),
    DSparkConfig: (DSparkModule, DSparkDraft),
    DFlash2Config: (DFlash2Module, DFlash2Draft),
}

DEEPSPEC = "deepspec"
DSPARK_LAYOUTS = ("specforge", DEEPSPEC)
"""What a DSpark draft can be written in: without the target's embedding and head, or with copies of them."""


def load_draft(
    name: str | Path | FoundDraft, target: Any, *, revision: str | None = None, dtype: torch.dtype | None = None
) -> BlockDraft:
    """The draft `name` on the target's device, checked against the target.

    name: one of `finding.DEMO_DRAFTS`, a local folder, or a hub name; or what `find_draft` found. revision: a hub
    branch, tag or commit. dtype: of the weights; None: the target's, which it decodes in. Raises CheckpointError for
    anything that doesn't fit.
    """
    found = name if isinstance(name, FoundDraft) else find_draft(name, revision=revision)
    with explained(f"draft={found.name!r}: not usable as a draft"):
        layout, values, files = found.layout, found.values, found.weights()
        config = layout.read(values, tensor_names(files), target)
        new_module, new_draft = METHODS[type(config)]
        with explained(f"{values.path}: no draft can be made by it"):
            refuse_larger_model(lambda: new_module(config), num_elements(files), str(values.path))
            module = new_module(config)
        maps = ("d2t", "t2d") if layout is speculators else ()
        tensors = _read_tensors(files, maps, found.quantised)
        if layout is speculators:
            speculators.take_vocabulary(values, tensors, config)
        _place(module, tensors)
        module.to(device=target.device, dtype=dtype or target.dtype).requires_grad_(False).eval()
        _refuse_not_finite(module, found.folder)
        if target.device.type == "cpu":
            pack_linears(module)
    return new_draft(module, target, name=found.name, revision=found.revision, files=files)


def save_draft(
    folder: str | os.PathLike[str],
    draft: BlockDraft,
    *,
    dtype: torch.dtype | None = None,
    int8: bool = False,
    layout: str | None = None,
) -> None:
    """Write config.json and model.safetensors so that load_draft reads them back.

    DFlash and DFlash 2 in z-lab's layout, DSpark in DeepSpec's or, where that can't hold it, SpecForge's. dtype: of
    the stored tensors; None keeps the draft's own. int8: store the matrices as row_scaled.py says. layout: of a DSpark
    draft, one of DSPARK_LAYOUTS; "deepspec" puts copies of the target's embedding and head into the file of a draft
    that has none of its own. Each file appears whole or not at all. Raises CheckpointError for a draft that its layout
    can't hold.
    """
    folder, config, tensors = Path(folder), draft.config, dict(draft.module.state_dict())
    dtype = dtype or draft.dtype
    written = str(dtype).removeprefix("torch.")
    if layout is not None and not (layout in DSPARK_LAYOUTS and isinstance(config, DSparkConfig)):
        wanted = f"one of {', '.join(DSPARK_LAYOUTS)}" if isinstance(config, DSparkConfig) else "None"
        raise CheckpointError(f"layout={layout!r}, expected {wanted} for a draft of method {draft.method}")
    if isinstance(config, DSparkConfig):
        plain = config.sample_from_anchor and config.causal is None and config.draft_vocab_size is None
        if layout == DEEPSPEC and plain:
            tensors = whole_tensors(draft)
            config = replace(config, own_embeddings=True, own_head=True, vocab_size=draft.target.vocab_size)
        own = config.own_embeddings and config.own_head
        as_deepspec = layout == DEEPSPEC or (layout is None and plain and own)
        content = (deepspec if as_deepspec else specforge).write(config, written)
        holds = plain or not as_deepspec
    else:
        holds = not (config.own_embeddings or config.own_head or config.sample_from_anchor)
        content = zlab.write(config, written)
    if not holds or config.draft_vocab_size is not None:
        raise CheckpointError(
            f"draft={draft.name!r}: the layout of {content['architectures'][0]} can't hold it (embedding, head, "
            "vocabulary, causality or sampling from the anchor); keep the checkpoint that it was loaded from"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if int8:
        tensors, content = row_scaled.row_scaled(tensors), content | {row_scaled.KEY: row_scaled.CONFIG}
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")
    part = folder / "config.json.part"
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / "config.json")


def _read_tensors(files: tuple[Path, ...], maps: tuple[str, ...], quantised: bool) -> dict[str, Tensor]:
    """All tensors of the files under the module's names: no `model.` prefix. Raises CheckpointError.

    maps: those that may be integers. quantised: int8 tensors have their scales beside them.
    """
    refuse_other_dtypes({
        key: (path, dtype)
        for key, (path, dtype) in other_dtypes(files).items()
        if key.removeprefix("model.") not in maps and not (quantised and dtype == "I8")
    })  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for path in files:
        with explained(f"{path} can't be read"), safe_open(path, framework="pt") as stream:
            for key in stream.keys():  # noqa: SIM118 (not a dict)
                name = key.removeprefix("model.")
                if name in tensors:
                    raise CheckpointError(f"{path}: tensor {key} occurs twice; keep one copy")
                tensors[name] = stream.get_tensor(key)
    return row_scaled.weights_of(tensors) if quantised else tensors


def _place(module: Backbone, tensors: dict[str, Tensor]) -> None:
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
            f"tensors that a draft with this configuration has no place for: {_some(extra)}; "
            "another method's draft, or a config.json that isn't the weights' own"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(tensor.shape)}, expected {list(wanted[name].shape)} by config.json"
            )
    module.load_state_dict(tensors)


def _refuse_not_finite(module: Backbone, folder: Path) -> None:
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
