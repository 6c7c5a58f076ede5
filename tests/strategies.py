"""Hypothesis strategies of logits and sampling parameters, and the fuzzing profile.

SPECMASK_FUZZ_EXAMPLES=n raises the number of examples of every fuzzed test and makes them new on each run.
"""

import os
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_EXAMPLES = os.environ.get("SPECMASK_FUZZ_EXAMPLES")
fuzz = settings(
    max_examples=int(_EXAMPLES or 60),
    derandomize=_EXAMPLES is None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

VOCABULARIES = (1, 2, 31, 32, 33, 257, 32001)
DTYPES = ("float32", "float16", "bfloat16")
LANDSCAPES = (
    "normal", "flat", "steep", "ties", "few_values", "plateau", "zeros", "holes", "one_hot", "near_ties",
    "denormal", "huge", "masked",
)  # fmt: skip


def landscape(kind, size, rng):
    """float32 [size] logits of a kind."""
    x = rng.normal(size=size).astype(np.float32)
    if kind == "normal":
        return x * np.float32(3)
    if kind == "flat":
        return x * np.float32(0.01)
    if kind == "steep":
        return x * np.float32(100)
    if kind == "ties":
        return np.round(x * 3).astype(np.float32)
    if kind == "few_values":
        return rng.choice(np.array([-2.0, -0.0, 0.0, 1.5], np.float32), size)
    if kind == "plateau":
        return np.full(size, x[0], np.float32)
    if kind == "zeros":
        return rng.choice(np.array([-0.0, 0.0], np.float32), size)
    if kind == "holes":
        x[rng.random(size) < 0.7] = -np.inf
        x[rng.integers(size)] = 1.0
        return x
    if kind == "one_hot":
        hot = np.full(size, -np.inf, np.float32)
        hot[rng.integers(size)] = x[0]
        return hot
    if kind == "near_ties":
        return np.float32(1) + rng.integers(0, 4, size).astype(np.float32) * np.float32(2**-23)
    if kind == "denormal":
        return x * np.float32(1e-40)
    if kind == "huge":
        return x * np.float32(1e37)
    if kind == "masked":  # a finite mask value in place of -inf
        x[rng.random(size) < 0.5] = np.finfo(np.float32).min
        return x
    raise ValueError(kind)


def cast(x, dtype):
    """float32 logits as the library takes the dtype (bfloat16: uint16 bits, cut)."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return np.clip(x, -65000, 65000, where=np.isfinite(x), out=x.copy()).astype(dtype)


@dataclass
class Rows:
    """Logits [R, V] and their parameters."""

    logits: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    def filter_arguments(self):
        return self.logits, self.temperature, self.top_k, self.top_p, self.min_p


temperatures = st.one_of(
    st.sampled_from([0.0, 1e-6, 1e-5, 1e-3, 0.1, 0.7, 1.0, 1.0, 2.0, 100.0, 1e6, 1e30]), st.floats(0.05, 5.0)
)
top_ps = st.one_of(st.sampled_from([1.0, 0.999999, 0.95, 0.9, 0.5, 0.1, 1e-6]), st.floats(1e-3, 1.0))
min_ps = st.one_of(st.just(0.0), st.just(0.0), st.sampled_from([1e-6, 0.05, 0.5, 0.999]), st.floats(0.0, 0.99))
unit = st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0.0, 1.0, exclude_max=True))


@st.composite
def row_batches(draw, num_rows=None, vocabularies=VOCABULARIES, invalid=True):
    """A batch of unlike rows over one vocabulary."""
    size = draw(st.sampled_from(vocabularies))
    count = draw(st.integers(1, 5)) if num_rows is None else num_rows
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = np.stack([landscape(draw(st.sampled_from(LANDSCAPES)), size, rng) for _ in range(count)])
    for row in range(count if invalid else 0):
        poison = draw(st.sampled_from(["none"] * 12 + ["nan", "-nan", "inf", "empty"]))
        if poison == "empty":
            x[row] = -np.inf
        elif poison != "none":
            values = {"nan": np.nan, "-nan": np.copysign(np.nan, -1), "inf": np.inf}
            x[row, rng.integers(size)] = values[poison]
    top_ks = st.sampled_from([0, 0, 1, 2, 3, 5, 20, 64, 1024, max(size - 1, 1), size, size + 10])

    def parameters(strategy, kind):
        return np.array([draw(strategy) for _ in range(count)], kind)

    top_p = np.maximum(parameters(top_ps, np.float32), np.float32(1e-6))
    return Rows(
        cast(x, dtype),
        parameters(temperatures, np.float32),
        parameters(top_ks, np.int32),
        top_p,
        np.minimum(parameters(min_ps, np.float32), np.float32(0.999)),
    )
