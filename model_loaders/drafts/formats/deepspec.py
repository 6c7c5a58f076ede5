"""DeepSpec's layout: DSpark, with an embedding and a head of its own and its keys at the top level.

Its ``dflash_*_block7`` checkpoints are DSpark models of rank 0: they sample from the anchor, unlike z-lab's DFlash.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from model_loaders.drafts.dspark import MARKOV_HEADS, RNN, VANILLA, DSparkConfig
from model_loaders.drafts.formats.values import (
    NOT_IMPLEMENTED,
    Values,
    check_presence,
    check_target,
    mask_token_id,
    qwen3_json,
    shared_fields,
)
from model_loaders.drafts.formats.values import layer_ids as checked_layer_ids

DSPARK = "Qwen3DSparkModel"
NESTED = ()


def read(values: Values, names: Collection[str], target: Any) -> DSparkConfig:
    """The configuration, checked against the target and the names of the tensors. Raises CheckpointError."""
    values.refuse_options(NOT_IMPLEMENTED | {"draft_vocab_size": values.raw.get("vocab_size")})
    fields = shared_fields(values, target) | {
        "target_layer_ids": checked_layer_ids(values, "target_layer_ids", values.get("target_layer_ids"), target),
        "mask_token_id": mask_token_id(values, target),
        "block_size": values.integer("block_size"),
        "vocab_size": values.integer("vocab_size"),
        "own_embeddings": True,
        "own_head": True,
    }
    config = DSparkConfig(**(fields | heads(values, names)))
    check_target(values, config, target)
    for tensor in ("embed_tokens.weight", "lm_head.weight"):
        check_presence(values, "architectures", True, tensor, names)
    return config


def heads(values: Values, names: Collection[str]) -> dict[str, Any]:
    """DSpark's own fields, which every layout that holds it shares, checked against the tensors' names."""
    rank = values.integer_or("markov_rank", 0, 0)
    kind = str(values.get("markov_head_type", VANILLA))
    if kind not in MARKOV_HEADS:
        raise values.error(f"markov_head_type={kind!r}, expected one of {', '.join(MARKOV_HEADS)}")
    for part in ("markov_w1", "markov_w2"):
        check_presence(values, "markov_rank", rank > 0, f"markov_head.{part}.weight", names)
    for part, owner in (("gate_proj", "gated"), ("joint_proj", RNN)):
        wanted = rank > 0 and kind == owner
        check_presence(values, "markov_head_type", wanted, f"markov_head.{part}.weight", names)
    confident = values.flag("enable_confidence_head")
    check_presence(values, "enable_confidence_head", confident, "confidence_head.proj.weight", names)
    with_markov = confident and values.flag("confidence_head_with_markov")
    if with_markov and not rank:
        raise values.error("confidence_head_with_markov=True with markov_rank=0, expected a Markov head")
    return {
        "markov_rank": rank,
        "markov_head_type": kind if rank else VANILLA,
        "confidence_head": confident,
        "confidence_with_markov": with_markov,
    }


def write(config: DSparkConfig, dtype: str) -> dict[str, Any]:
    """config.json of a DSpark draft with its own embedding and head."""
    return qwen3_json(config, DSPARK, dtype) | {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_anchors": 1,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
