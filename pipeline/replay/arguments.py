"""The arguments that the trainer's functions share: checked, and as they compute with them."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import torch

from pipeline.errors import InvalidRequest
from pipeline.results.mask_checks import kind_of

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_logits(logits: torch.Tensor) -> None:
    """Refuse what isn't a trainer's logits.

    Raises:
        InvalidRequest: Not a tensor [tokens, V] of a floating dtype and on a device that is served.
    """
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or logits.dtype not in LOGIT_DTYPES:
        raise InvalidRequest(
            f"logits={kind_of(logits)}, expected a tensor [tokens, vocabulary] in float32, bfloat16, float16 or float64"
        )
    if logits.is_cuda and importlib.util.find_spec("cupy") is None:
        raise InvalidRequest(
            f"logits on {logits.device}, expected CuPy for them: install specmask[cuda12] or specmask[cuda13], or move "
            "them to the CPU"
        )
    if not logits.is_cuda and logits.device.type != "cpu":
        raise InvalidRequest(f"logits on {logits.device}, expected them on the CPU or on CUDA")


def check_count(logits: torch.Tensor, num_tokens: int) -> None:
    """Refuse logits of another number of tokens.

    Raises:
        InvalidRequest: It isn't `num_tokens`.
    """
    if len(logits) != num_tokens:
        raise InvalidRequest(f"logits rows={len(logits)}, expected {num_tokens}: one for every recorded token")


def per_token(name: str, values: Any, num_tokens: int) -> np.ndarray:
    """A number a token, float64 [num_tokens]; one number stands for all.

    Raises:
        InvalidRequest: Another shape, or what isn't a finite number.
    """
    array = values.detach().cpu().double().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.dtype.kind not in "fiu" or array.shape not in ((), (num_tokens,)):
        raise InvalidRequest(f"{name}={kind_of(array)}, expected a number, or {num_tokens} of them: one a token")
    array = np.array(np.broadcast_to(array, num_tokens), np.float64)
    wrong = np.flatnonzero(~np.isfinite(array))
    if len(wrong):
        raise InvalidRequest(f"{name}[{wrong[0]}]={array[wrong[0]]}, expected a finite number")
    return array


def temperatures(values: Any, num_tokens: int) -> np.ndarray:
    """Temperatures, float64 [num_tokens].

    Raises:
        InvalidRequest: One below 0 or not finite.
    """
    array = per_token("temperature", values, num_tokens)
    wrong = np.flatnonzero(array < 0)
    if len(wrong):
        raise InvalidRequest(f"temperature[{wrong[0]}]={array[wrong[0]]}, expected at least 0")
    return array


def positive_number(name: str, value: Any) -> float:
    """A finite number above 0.

    Raises:
        InvalidRequest: Anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value > 0 and math.isfinite(value)):
        raise InvalidRequest(f"{name}={value!r}, expected a finite number above 0")
    return float(value)
