"""Tiny random draft checkpoints in every published layout, written from their description, without the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# Every layout that loads, by a name for tests: (layout, what makes it that method).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("zlab", {}),
    "dflash2": ("zlab", {"conv": (2, 4), "selector": (3, 4)}),
    "dflash2 selector only": ("zlab", {"selector": (3, 5)}),
    "dflash2 convolutions only": ("zlab", {"conv": (3, 2)}),
    "dspark vanilla": ("deepspec", {"rank": 3, "confidence": True, "with_markov": True}),
    "dspark gated": ("deepspec", {"rank": 4, "markov": "gated", "confidence": True}),
    "dspark rnn": ("deepspec", {"rank": 3, "markov": "rnn", "confidence": True, "with_markov": True}),
    "dspark rank 0": ("deepspec", {"rank": 0}),
    "specforge": ("specforge", {"rank": 3, "confidence": True, "with_markov": True}),
    "specforge borrowed": ("specforge", {"rank": 3, "own": False, "from_anchor": False}),
    "speculators dflash": ("speculators", {"narrow": True, "own": True}),
    "speculators dflash borrowed": ("speculators", {"narrow": True, "own": False}),
    "speculators dflash whole": ("speculators", {"own": False, "from_anchor": True}),
    "speculators dspark": ("speculators", {"rank": 3, "narrow": True, "own": True, "confidence": True}),
    "speculators dspark gated": ("speculators", {"rank": 3, "markov": "gated", "own": False}),
}


def write(
    folder: str | Path,
    kind: str,
    target: Any,
    *,
    block_size: int = 4,
    mask_token_id: int = 0,
    layer_ids: tuple[int, ...] = (0,),
    heads: tuple[int, int, int] = (2, 1, 8),
    layers: int = 2,
    layer_types: list[str] | None = None,
    seed: int = 0,
    sharpness: float = 2.0,
    **extra: Any,
) -> Path:
    """Write config.json and model.safetensors of a random draft of this kind for a target; returns the folder.

    block_size: rows of the draft's own block. heads: query heads, key heads, head_dim. sharpness: the scale of what
    makes logits. extra: keys of config.json that go in last (of transformer_layer_config for speculators).
    """
    layout, parts = KINDS[kind]
    d, vocab_size = target.hidden_size, target.vocab_size
    made = _Tensors(seed)
    tensors = _backbone(made, d, 2 * d, heads, layers, len(layer_ids))
    narrow = max(2, vocab_size * 3 // 4) if parts.get("narrow") else vocab_size
    rank, markov = parts.get("rank", 0), parts.get("markov", "vanilla")
    if layout == "deepspec" or (layout != "zlab" and parts.get("own", True)):
        tensors["lm_head.weight"] = made.random(narrow, d, scale=sharpness / d**0.5)
    if layout == "deepspec" or (layout == "specforge" and parts.get("own", True)):
        tensors["embed_tokens.weight"] = made.random(vocab_size, d, scale=1.0)
    if rank:
        tensors["markov_head.markov_w1.weight"] = made.random(vocab_size, rank, scale=1.0)
        tensors["markov_head.markov_w2.weight"] = made.random(narrow, rank, scale=sharpness / rank**0.5)
    for part, kind_of_head, shape in (
        ("gate_proj", "gated", (rank, d + rank)),
        ("joint_proj", "rnn", (3 * rank, 2 * rank + d)),
    ):
        if rank and markov == kind_of_head:
            tensors[f"markov_head.{part}.weight"] = made.random(*shape)
            tensors[f"markov_head.{part}.bias"] = made.random(shape[0], scale=0.5)
    if parts.get("confidence"):
        width = d + (rank if parts.get("with_markov") else 0)
        tensors["confidence_head.proj.weight"] = made.random(1, width, scale=2 / width**0.5)
        tensors["confidence_head.proj.bias"] = made.random(1, scale=0.5)
    if narrow < vocab_size:
        tokens = torch.randperm(vocab_size, generator=made.generator)[:narrow].sort().values
        tensors["d2t"] = tokens - torch.arange(narrow)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    config = _qwen3(target, d, heads, layers, layer_types)
    keys = {"block_size": block_size, "mask_token_id": mask_token_id}
    dspark_keys = {
        "markov_rank": rank,
        "markov_head_type": markov,
        "enable_confidence_head": parts.get("confidence", False),
        "confidence_head_with_markov": parts.get("with_markov", False),
        "num_anchors": 8,
    }
    if layout == "zlab":
        nested = keys | {"target_layer_ids": list(layer_ids)}
        if "conv" in parts:
            nested |= dict(zip(("conv_kernel_size", "conv_group_size"), parts["conv"], strict=True))
            _convolutions(made, tensors, d, layers, *parts["conv"])
        if "selector" in parts:
            nested |= dict(zip(("selector_rank", "selector_top_k"), parts["selector"], strict=True))
            _selector(made, tensors, d, vocab_size, parts["selector"][0], sharpness)
        name = "DFlash2DraftModel" if parts else "DFlashDraftModel"
        config |= {"architectures": [name], "dflash_config": nested} | extra
    elif layout == "deepspec":
        config |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": list(layer_ids)}
        config |= keys | dspark_keys | extra
    elif layout == "specforge":
        nested = keys | dspark_keys | {"target_layer_ids": list(layer_ids), "projector_type": "dspark"}
        if "from_anchor" in parts:
            nested["sample_from_anchor"] = parts["from_anchor"]
        config |= {"architectures": ["DSparkDraftModel"], "dflash_config": nested} | extra
    else:
        dspark = "rank" in parts
        del config["num_target_layers"]
        config = {
            "speculators_model_type": "dspark" if dspark else "dflash",
            "architectures": ["DSparkSpeculator" if dspark else "DFlashSpeculator"],
            "speculators_config": {"algorithm": "dspark" if dspark else "dflash", "verifier": {"name_or_path": "x"}},
            "transformer_layer_config": config | extra,
            "draft_vocab_size": narrow,
            "aux_hidden_state_layer_ids": [i + 1 for i in layer_ids],
        } | keys
        if dspark:
            config |= dspark_keys
        if "from_anchor" in parts:
            config["sample_from_anchor"] = parts["from_anchor"]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class _Tensors:
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, scale: float | None = None) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if scale is None else scale
        return scale * torch.randn(shape, generator=self.generator)

    def norm(self, width: int) -> torch.Tensor:
        return 1 + self.random(width, scale=0.1)


def _backbone(made: _Tensors, d: int, inter: int, heads: tuple[int, int, int], layers: int, taps: int) -> dict:
    query, key, width = heads
    tensors = {"fc.weight": made.random(d, taps * d), "hidden_norm.weight": made.norm(d), "norm.weight": made.norm(d)}
    for layer in range(layers):
        name = f"layers.{layer}"
        for part, rows in (("q", query * width), ("k", key * width), ("v", key * width)):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = made.random(rows, d)
        tensors[f"{name}.self_attn.o_proj.weight"] = made.random(d, query * width)
        tensors |= {f"{name}.self_attn.{part}_norm.weight": made.norm(width) for part in "qk"}
        tensors |= {f"{name}.{part}_layernorm.weight": made.norm(d) for part in ("input", "post_attention")}
        tensors |= {f"{name}.mlp.{part}_proj.weight": made.random(inter, d) for part in ("gate", "up")}
        tensors[f"{name}.mlp.down_proj.weight"] = made.random(d, inter)
    return tensors


def _convolutions(made: _Tensors, tensors: dict, d: int, layers: int, taps: int, group: int) -> None:
    for layer in range(layers):
        for part in ("attention_conv", "mlp_conv"):
            kernel = made.random(2, taps, d, scale=0.5)
            kernel[:, 0] += 1
            tensors[f"layers.{layer}.{part}.base_kernel"] = kernel
            tensors[f"layers.{layer}.{part}.kernel_projection.weight"] = made.random(2 * taps * d // group, d)


def _selector(made: _Tensors, tensors: dict, d: int, vocab_size: int, rank: int, sharpness: float) -> None:
    for part in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{part}"] = made.random(vocab_size, rank, scale=(sharpness / rank**0.5) ** 0.5)
    tensors["candidate_selector.hidden_projection.weight"] = made.random(rank, d)


def _qwen3(target: Any, d: int, heads: tuple[int, int, int], layers: int, layer_types: list[str] | None) -> dict:
    query, key, width = heads
    return {
        "model_type": "qwen3",
        "hidden_size": d,
        "intermediate_size": 2 * d,
        "num_hidden_layers": layers,
        "num_attention_heads": query,
        "num_key_value_heads": key,
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": layer_types or ["full_attention"] * layers,
        "sliding_window": 3 if layer_types else None,
        "num_target_layers": target.num_layers,
        "vocab_size": target.vocab_size,
    }
