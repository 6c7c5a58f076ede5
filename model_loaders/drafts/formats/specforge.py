"""SpecForge's layout: DSpark, its keys in a ``dflash_config`` (or ``dspark_config``) object or at the top level.

Embedding and head are the draft's own where the weights hold them, else the target's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from model_loaders.drafts.dspark import RNN, DSparkConfig
from model_loaders.drafts.formats.deepspec import heads
from model_loaders.drafts.formats.values import (
    NOT_IMPLEMENTED,
    Values,
    check_target,
    mask_token_id,
    qwen3_json,
    shared_fields,
)
from model_loaders.drafts.formats.values import layer_ids as checked_layer_ids

DSPARK = "DSparkDraftModel"
NESTED = ("dflash_config", "dspark_config")

_REFUSED = NOT_IMPLEMENTED | {"projector_type": "dspark", "attention_mode": "gqa"}
_KNOWN = {
    "target_layer_ids", "mask_token_id", "mask_token", "block_size", "num_target_layers", "sample_from_anchor",
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "num_anchors", "confidence_head_alpha",
}  # fmt: skip


def read(values: Values, names: Collection[str], target: Any) -> DSparkConfig:
    """The configuration, checked against the target and the names of the tensors. Raises CheckpointError."""
    values.refuse_options(_REFUSED | {"draft_vocab_size": values.raw.get("vocab_size")})
    values.warn_unknown(_KNOWN | _REFUSED.keys() | {"draft_vocab_size"})
    if (kind := values.raw.get("model_type", "qwen3")) != "qwen3":
        raise values.error(f"model_type={kind!r}, expected 'qwen3'; this version has no other DSpark backbone")
    from_anchor = values.flag("sample_from_anchor", True)
    fields = shared_fields(values, target) | {
        "target_layer_ids": checked_layer_ids(values, "target_layer_ids", values.get("target_layer_ids"), target),
        "mask_token_id": mask_token_id(values, target),
        "block_size": values.integer("block_size", 1 if from_anchor else 2),
        "causal": values.checked_flag("is_causal", values.raw.get("is_causal")),
        "vocab_size": values.integer("vocab_size"),
        "sample_from_anchor": from_anchor,
        "own_embeddings": "embed_tokens.weight" in names,
        "own_head": "lm_head.weight" in names,
    }
    config = DSparkConfig(**(fields | heads(values, names)))
    refuse_shifted_rnn(values, config)
    check_target(values, config, target)
    return config


def write(config: DSparkConfig, dtype: str) -> dict[str, Any]:
    """config.json of a DSpark draft; embedding and head are the draft's own if the weights hold them."""
    nested = {
        "projector_type": "dspark",
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    causal = {} if config.causal is None else {"is_causal": config.causal}
    return qwen3_json(config, DSPARK, dtype) | causal | {"dflash_config": nested}


def refuse_shifted_rnn(values: Values, config: DSparkConfig) -> None:
    """Raise CheckpointError for an rnn head that doesn't sample from the anchor: what its state starts from isn't
    published."""
    if config.markov_rank and config.markov_head_type == RNN and not config.sample_from_anchor:
        raise values.error(f"markov_head_type={RNN!r} with sample_from_anchor=False, expected true")
