"""z-lab's layout: DFlash and DFlash 2.

A Qwen3 configuration with a ``dflash_config`` object, whose keys win over those at the top level. No embedding and no
head: both are the target's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from model_loaders.drafts.backbone import DraftConfig
from model_loaders.drafts.dflash2 import DFlash2Config
from model_loaders.drafts.formats.values import (
    NOT_IMPLEMENTED,
    Values,
    check_presence,
    check_target,
    mask_token_id,
    qwen3_json,
    shared_fields,
    target_layer_ids,
)

DFLASH, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"
NESTED = ("dflash_config",)

_OTHER_METHODS: dict[str, Any] = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "sample_from_anchor": False,
}
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# The last three have no influence on inference.
_KNOWN = {"target_layer_ids", "mask_token_id", "mask_token", "block_size", "num_target_layers", "causal"} | {
    "output_multiplier", "final_logit_softcapping", "input_embedding_scale",
    "num_anchors", "markov_head_type", "confidence_head_with_markov",
}  # fmt: skip


def read(values: Values, names: Collection[str], target: Any) -> DraftConfig:
    """The configuration, checked against the target and the names of the tensors. Raises CheckpointError."""
    dflash2 = values.raw.get("architectures") == [DFLASH2]
    refused = NOT_IMPLEMENTED | _OTHER_METHODS
    values.refuse_options(refused if dflash2 else refused | dict.fromkeys(_DFLASH2_KEYS))
    narrow, vocab_size = values.get("draft_vocab_size"), values.raw.get("vocab_size")
    if narrow is not None and narrow != vocab_size:
        raise values.error(f"draft_vocab_size={narrow!r}, expected vocab_size={vocab_size!r}; this layout has no d2t")
    values.warn_unknown(_KNOWN | refused.keys() | {"draft_vocab_size", *_DFLASH2_KEYS})
    nested = values.nested["dflash_config"]
    is_causal = values.checked_flag("is_causal", values.raw.get("is_causal"))
    causal = values.checked_flag("causal", nested.get("causal"))
    softcap = values.get("final_logit_softcapping")
    fields = shared_fields(values, target) | {
        "target_layer_ids": target_layer_ids(values, target, default_layer_ids),
        "block_size": values.integer("block_size", 2),
        "mask_token_id": mask_token_id(values, target),
        "causal": causal if "causal" in nested else is_causal,
        "embedding_scale": values.positive("input_embedding_scale", 1.0),
        "output_multiplier": values.positive("output_multiplier", 1.0),
        # 0 is off
        "final_logit_softcapping": values.positive("final_logit_softcapping") if softcap else None,
    }
    config = DraftConfig(**fields)
    if dflash2:
        whole = fields | {"vocab_size": fields["vocab_size"] or target.vocab_size}  # the codebooks have a row a token
        config = DFlash2Config(**(whole | _parts(values, names)))
        if config.selector_top_k > (config.vocab_size or 0):
            raise values.error(f"selector_top_k={config.selector_top_k}, expected at most {config.vocab_size} tokens")
    check_target(values, config, target)
    return config


def _parts(values: Values, names: Collection[str]) -> dict[str, Any]:
    """DFlash 2's own fields: convolutions and a selector, each with both of its keys or neither."""
    found = {key: values.integer_or(key, 0) for key in _DFLASH2_KEYS}
    if not any(found.values()):
        raise values.error(f"{_shown(values, 'conv_kernel_size', 'selector_rank')}, expected one of them for {DFLASH2}")
    for one, other in (_DFLASH2_KEYS[:2], _DFLASH2_KEYS[2:]):
        if bool(found[one]) != bool(found[other]):
            raise values.error(f"{_shown(values, one, other)}, expected both or neither")
    group, hidden_size = found["conv_group_size"], values.integer("hidden_size")
    if group and hidden_size % group:
        raise values.error(f"conv_group_size={group}, expected a divisor of hidden_size={hidden_size}")
    rank, taps = found["selector_rank"], found["conv_kernel_size"]
    for part in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight"):
        check_presence(values, "selector_rank", bool(rank), f"candidate_selector.{part}", names)
    for part in ("attention_conv", "mlp_conv"):
        check_presence(values, "conv_kernel_size", bool(taps), f"layers.0.{part}.base_kernel", names)
    return found


def _shown(values: Values, *keys: str) -> str:
    return ", ".join(f"{key}={values.shown(key)}" for key in keys)


def default_layer_ids(num_draft_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """z-lab's rule for which target layers feed a draft: evenly spread, clear of both ends."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def write(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """config.json of a DFlash or DFlash 2 draft."""
    dflash2 = isinstance(config, DFlash2Config)
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.causal is not None:
        nested["causal"] = config.causal
    for key, value, off in (
        ("input_embedding_scale", config.embedding_scale, 1.0),
        ("output_multiplier", config.output_multiplier, 1.0),
        ("final_logit_softcapping", config.final_logit_softcapping, None),
    ):
        if value != off:
            nested[key] = value
    if isinstance(config, DFlash2Config):
        nested |= {key: getattr(config, key) for key in _DFLASH2_KEYS if getattr(config, key)}
    return qwen3_json(config, DFLASH2 if dflash2 else DFLASH, dtype) | {"dflash_config": nested}
