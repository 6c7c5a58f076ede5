"""How many slots the device's memory holds."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from model_loaders import RowCache
from pipeline.engine.adjusting import Adjusting
from pipeline.errors import InvalidRequest
from pipeline.options import Options

KEPT_FREE = 0.1
"""The share of the free memory that stays for what isn't foreseen: graphs, prompts' activations, other arrays."""


def slot_bytes(target: Any, draft: Any, room: int, max_support: int) -> int:
    """Bytes that one slot of `room` entries takes: keys and values, and its part of a round's working memory."""
    width = 1 if draft is None else 1 + draft.num_drafts
    caches = [target.new_cache(1, room)] + ([] if draft is None else [draft.new_cache(1, room)])
    logits = width * target.vocab_size
    # Logits, a grammar round's copy of them, a float32 copy, the laws of drafts and the filter's notes; then supports
    # on the device, masks on their way, and what penalties and biases read.
    working = logits * (2 * target.dtype.itemsize + 4 + (0 if draft is None else 8) + 2)
    working += target.vocab_size * Adjusting.BYTES_A_TOKEN
    masks = width * min(max_support, target.vocab_size) * (16 + 3 * 8)
    return sum(cache.full_bytes() for cache in caches if isinstance(cache, RowCache)) + working + masks


def fitting(options: Options, free: int, a_slot: int) -> Options:
    """The options with as many slots as fit, which is said if they are fewer.

    Args:
        options: As asked for.
        free: Bytes of memory.
        a_slot: Bytes of one slot.

    Raises:
        InvalidRequest: Not even one slot fits.
    """
    most = int(free * (1 - KEPT_FREE)) // a_slot
    if most < 1:
        raise InvalidRequest(
            f"max_length={options.max_length}, expected less: a slot takes {a_slot / 1e9:.2f} GB, and {free / 1e9:.2f} "
            "GB are free; give the pipeline a smaller max_length or max_support, or free memory"
        )
    if most >= options.max_batch:
        return options
    warnings.warn(
        f"max_batch={options.max_batch} doesn't fit: a slot takes {a_slot / 1e9:.2f} GB and {free / 1e9:.1f} GB are "
        f"free; max_batch={most} is used",
        stacklevel=4,
    )
    return replace(options, max_batch=most)


def fit_device(options: Options, target: Any, draft: Any, room: int) -> Options:
    """The options with `max_batch` as the target's device has memory for; unchanged on the CPU.

    Raises:
        InvalidRequest: Not even one slot fits.
    """
    if target.device.type != "cuda":
        return options
    free, _ = torch.cuda.mem_get_info(target.device)
    free += torch.cuda.memory_reserved(target.device) - torch.cuda.memory_allocated(target.device)
    return fitting(options, free, slot_bytes(target, draft, room, options.max_support))
