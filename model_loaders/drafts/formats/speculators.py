"""vllm-project/speculators' layout: DFlash and DSpark.

The backbone's configuration is the ``transformer_layer_config`` object, without the values that are its class's
defaults. ``aux_hidden_state_layer_ids`` counts the embedding as 0, so it is one more than the layer. Where
``draft_vocab_size`` is less than the vocabulary, ``d2t`` int [draft_vocab_size] holds the offset of each draft token's
target token and ``t2d`` bool [vocab_size] marks those tokens. Without a head of its own the draft takes the target's
(its rows of ``d2t``). Full layers see their whole block; sliding layers too if ``sliding_window_non_causal``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from model_loaders.drafts.backbone import DraftConfig
from model_loaders.drafts.dspark import DSparkConfig
from model_loaders.drafts.formats.deepspec import heads
from model_loaders.drafts.formats.specforge import refuse_shifted_rnn
from model_loaders.drafts.formats.values import (
    NOT_IMPLEMENTED,
    Values,
    check_target,
    layer_ids,
    mask_token_id,
    shared_fields,
)
from model_loaders.errors import CheckpointError

TYPES = ("dflash", "dspark")
NESTED = ()
# Of the target, stored for training.
IGNORED_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")

_REFUSED = {"projector_type": "dflash", "shift_label": False, "quantization_config": None}
_MODEL_TYPES = ("qwen3", "llama")


def read(values: Values, names: Collection[str], target: Any) -> DraftConfig:
    """The configuration, checked against the target and the names of the tensors. Raises CheckpointError."""
    algorithm = _outer(values).get("algorithm")
    kind = values.get("speculators_model_type", algorithm)
    if kind not in TYPES:
        raise values.error(f"speculators_model_type={kind!r}, expected one of {', '.join(TYPES)}")
    if algorithm not in (None, kind):
        raise values.error(f"speculators_config.algorithm={algorithm!r}, but speculators_model_type={kind!r}")
    values.refuse_options(_REFUSED)
    if (width := values.get("target_hidden_size")) is not None and width != target.hidden_size:
        raise values.error(
            f"target_hidden_size={width!r}, but the target has {target.hidden_size}; load the draft with its own target"
        )
    dspark = kind == "dspark"
    from_anchor = values.flag("sample_from_anchor", dspark)
    inner = _transformer(values)
    inner.refuse_options(NOT_IMPLEMENTED)
    vocab_size = inner.integer("vocab_size")
    narrow = values.integer_or("draft_vocab_size", vocab_size)
    if narrow > vocab_size:
        raise values.error(f"draft_vocab_size={narrow}, expected at most vocab_size={vocab_size}")
    if narrow < vocab_size and "d2t" not in names:
        raise values.error(
            f"draft_vocab_size={narrow} with vocab_size={vocab_size}, but the weights hold no tensor d2t; "
            "fetch all files"
        )
    key = "aux_hidden_state_layer_ids"
    fields = shared_fields(inner, target) | {
        "num_target_layers": target.num_layers,
        "target_layer_ids": layer_ids(values, key, values.get(key), target, 1),
        "block_size": values.integer("block_size", 1 if from_anchor else 2),
        "mask_token_id": mask_token_id(values, target),
        "causal": False if values.flag("sliding_window_non_causal") else None,
        "sample_from_anchor": from_anchor,
        "own_embeddings": "embed_tokens.weight" in names,
        "own_head": "lm_head.weight" in names,
        "draft_vocab_size": narrow if narrow < vocab_size else None,
    }
    if not dspark:
        config = DraftConfig(**fields)
    else:
        config = DSparkConfig(**(fields | heads(values, names)))
        refuse_shifted_rnn(values, config)
    check_target(inner, config, target)
    _warn_of_another_count(values, config)
    return config


def take_vocabulary(values: Values, tensors: dict[str, Tensor], config: DraftConfig) -> None:
    """Check d2t against t2d; leave d2t, int64, among the tensors where the draft needs it. Raises CheckpointError."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    for name in IGNORED_TENSORS:
        tensors.pop(name, None)
    narrow, vocab_size = config.draft_vocab_size, config.vocab_size
    if narrow is None or vocab_size is None:
        return
    assert d2t is not None
    if d2t.dtype not in (torch.int64, torch.int32) or list(d2t.shape) != [narrow]:
        raise values.error(f"tensor d2t is {d2t.dtype} {list(d2t.shape)}, expected int64 [{narrow}], draft_vocab_size")
    tokens = torch.arange(narrow) + d2t
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise values.error(f"tensor d2t leads to token {int(outside[0])}, expected ids below vocab_size={vocab_size}")
    if tokens.unique().numel() != narrow:
        raise values.error(f"tensor d2t leads to {tokens.unique().numel()} tokens, expected {narrow} distinct ones")
    if t2d is not None and list(t2d.shape) != [vocab_size]:
        raise values.error(f"tensor t2d has shape {list(t2d.shape)}, expected [{vocab_size}], vocab_size")
    if t2d is not None and t2d.nonzero().flatten().tolist() != tokens.sort().values.tolist():
        marked = int(t2d.count_nonzero())
        raise values.error(f"tensor t2d marks {marked} tokens, expected the {narrow} that d2t leads to")
    tensors["d2t"] = d2t.long()


def _outer(values: Values) -> dict[str, Any]:
    """The speculators_config object."""
    outer = values.get("speculators_config", {})
    if not isinstance(outer, dict):
        raise values.error(f"speculators_config={outer!r}, expected an object")
    return outer


def _warn_of_another_count(values: Values, config: DraftConfig) -> None:
    """Older checkpoints say only by the number of tokens whether the anchor's row proposes one."""
    methods = _outer(values).get("proposal_methods")
    if values.get("sample_from_anchor") is not None or not isinstance(methods, list):
        return
    proposed = config.block_size - (not config.sample_from_anchor)
    counts = [method.get("speculative_tokens") for method in methods if isinstance(method, dict)]
    other = [count for count in counts if count not in (None, proposed)]
    if other:
        warnings.warn(
            f"{values.path}: speculative_tokens={other[0]!r}, but block_size={config.block_size} proposes {proposed} "
            f"with sample_from_anchor={config.sample_from_anchor}, which is assumed as config.json doesn't say; a "
            "draft read the wrong way proposes badly: set sample_from_anchor",
            stacklevel=4,
        )


def _transformer(values: Values) -> Values:
    """The backbone's configuration with its class's defaults filled in."""
    found = values.get("transformer_layer_config")
    if not isinstance(found, dict):
        raise values.error(f"transformer_layer_config={found!r}, expected an object")
    kind = found.get("model_type", "qwen3")
    if kind not in _MODEL_TYPES:
        raise values.error(f"transformer_layer_config.model_type={kind!r}, expected one of {', '.join(_MODEL_TYPES)}")
    given = {key: value for key, value in found.items() if key not in ("model_type", "transformers_version")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = AutoConfig.for_model(kind, **given).to_dict()
    except Exception as error:
        raise CheckpointError(
            f"{values.path}: transformer_layer_config is no {kind} configuration: {type(error).__name__}: {error}"
        ) from error
    # transformers rewrites what it understands; what the checkpoint says itself is what is checked.
    return Values(values.path, whole | given)
