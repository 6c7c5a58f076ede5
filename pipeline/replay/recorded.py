"""What a trainer needs of many rollouts: their tokens side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import InvalidRequest
from pipeline.replay.arguments import temperatures
from pipeline.results.mask_checks import check_logprobs, check_shape, join_masks
from pipeline.results.rollout import Rollout, SamplingMask, TopLogprobs
from pipeline.results.rollouts import Rollouts


@dataclass(frozen=True, eq=False)
class Recorded:
    """The record of n tokens of one or more rollouts, in order.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n], under the policies the tokens were drawn from.
        temperature: float64 [n].
        starts: int64 [rollouts + 1]; rollout i's tokens are ``starts[i]:starts[i + 1]``.
        mask: The supports, n rows, or None.
        top_logprobs: The largest log-probabilities, n rows, or None.
        filtered: bool [n], whether top_k, top_p or min_p cut the policy; None if that isn't known.

    Raises:
        InvalidRequest: Arrays that don't line up; a log-probability that isn't finite or is above 0 (by 2e-5), by row.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    temperature: np.ndarray
    starts: np.ndarray
    mask: SamplingMask | None = None
    top_logprobs: TopLogprobs | None = None
    filtered: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("logprobs", "temperature", "filtered"):
            value = getattr(self, name)
            if value is not None and np.shape(value) != (n,):
                raise InvalidRequest(f"{name}: shape {list(np.shape(value))}, expected [{n}]: one a token")
        starts = np.asarray(self.starts)
        if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or starts[-1] != n or (np.diff(starts) < 0).any():
            raise InvalidRequest(f"starts={starts.tolist()[:8]}, expected ascending ones from 0 to {n}")
        check_logprobs("logprobs", self.logprobs)
        lost = np.flatnonzero(np.isneginf(self.logprobs))
        if len(lost):
            raise InvalidRequest(f"logprobs[{lost[0]}]=-inf, expected a finite number: the token was drawn")
        if self.mask is not None:
            check_shape(self.mask, n)
        top = self.top_logprobs
        if top is not None and (len(top.ids) != n or len(top.values) != n):
            raise InvalidRequest(f"top_logprobs: {len(top.ids)} rows, expected {n}: one a token")

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout], temperature: float | None = None) -> Recorded:
        """The tokens of all `rollouts` side by side.

        Args:
            rollouts: Finished ones, with `logprobs`; all with a mask of one mode, or none; all with as many
                `top_logprobs`, or none.
            temperature: What they were sampled with; None: what the provenance of `Rollouts` says, rollout by rollout.

        Raises:
            InvalidRequest: By the index of the rollout: one that failed, lacks a record that others have, or whose
                arrays don't line up; no rollouts; a temperature that isn't known.
        """
        if not rollouts:
            raise InvalidRequest("rollouts=[], expected at least one")
        for i, rollout in enumerate(rollouts):
            _check_rollout(i, rollout, rollouts[0])
        counts = [len(rollout.token_ids) for rollout in rollouts]
        params = _params(rollouts, temperature)
        filtered = None
        if params is not None:
            filtered = np.repeat([_filters(one) for one in params], counts)
        if temperature is None:
            assert params is not None
            # The kernels take the temperature in float32: that is what the tokens were drawn with.
            each = np.array([np.float32(one["temperature"]) for one in params], np.float64)
        else:
            each = np.full(len(rollouts), temperature, np.float64)
        masks = [rollout.sampling_mask for rollout in rollouts if rollout.sampling_mask is not None]
        tops = [rollout.top_logprobs for rollout in rollouts if rollout.top_logprobs is not None]
        logprobs = [rollout.logprobs for rollout in rollouts if rollout.logprobs is not None]
        return cls(
            token_ids=np.concatenate([rollout.token_ids for rollout in rollouts], dtype=np.int32),
            logprobs=np.concatenate(logprobs, dtype=np.float32),
            temperature=temperatures(np.repeat(each, counts), sum(counts)),
            starts=np.cumsum([0, *counts]),
            mask=join_masks(masks) if masks else None,
            top_logprobs=TopLogprobs(
                np.concatenate([top.ids for top in tops]), np.concatenate([top.values for top in tops])
            )
            if tops
            else None,
            filtered=filtered,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def per_token(self, values: Any) -> np.ndarray:
        """One value a rollout (a reward, an advantage), repeated for each of its tokens, [n].

        Raises:
            InvalidRequest: Not as many as there are rollouts.
        """
        values = np.asarray(values)
        if values.shape != (len(self.starts) - 1,):
            raise InvalidRequest(f"values: shape {list(values.shape)}, expected one for each of {len(self.starts) - 1}")
        return np.repeat(values, np.diff(self.starts))


def _check_rollout(i: int, rollout: Rollout, first: Rollout) -> None:
    if not rollout.ok:
        raise InvalidRequest(
            f"rollouts[{i}].error={rollout.error!r}, expected finished rollouts: leave those in `failed` out"
        )
    if rollout.logprobs is None:
        raise InvalidRequest(f"rollouts[{i}].logprobs=None, expected return_logprobs=True when sampling")
    n = len(rollout.token_ids)
    if len(rollout.logprobs) != n:
        raise InvalidRequest(f"rollouts[{i}].logprobs: {len(rollout.logprobs)}, expected {n}: one a token")
    mask, top = rollout.sampling_mask, rollout.top_logprobs
    for name in ("sampling_mask", "top_logprobs"):
        if (getattr(rollout, name) is None) != (getattr(first, name) is None):
            missing = i if getattr(rollout, name) is None else 0
            raise InvalidRequest(f"rollouts[{missing}].{name}=None, expected one in all rollouts or in none")
    if mask is not None:
        try:
            check_shape(mask, n)
        except InvalidRequest as error:
            raise InvalidRequest(f"rollouts[{i}]: {error}") from None
    if top is not None:
        assert first.top_logprobs is not None
        expected = (n, first.top_logprobs.ids.shape[1])
        if top.ids.shape != expected or top.values.shape != expected:
            raise InvalidRequest(
                f"rollouts[{i}].top_logprobs: ids {list(top.ids.shape)}, values {list(top.values.shape)}, expected "
                f"{list(expected)}: one K for all"
            )


def _params(rollouts: Sequence[Rollout], temperature: float | None) -> list[dict[str, Any]] | None:
    known = rollouts.provenance.get("params") if isinstance(rollouts, Rollouts) else None
    if known is None:
        if temperature is None:
            raise InvalidRequest(
                "temperature=None, expected a number: these rollouts have no provenance that says it (a slice of "
                "Rollouts keeps it, a plain list doesn't)"
            )
        return None
    for i, rollout in enumerate(rollouts):
        if not 0 <= rollout.params_index < len(known):
            raise InvalidRequest(
                f"rollouts[{i}].params_index={rollout.params_index}, expected one of the provenance's {len(known)}"
            )
    return [known[rollout.params_index] for rollout in rollouts]


def _filters(params: dict[str, Any]) -> bool:
    return params["top_k"] is not None or params["top_p"] < 1 or params["min_p"] > 0
