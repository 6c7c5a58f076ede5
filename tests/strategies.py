"""Hypothesis strategies of logits and sampling parameters, and the fuzzing profile.

SPECMASK_FUZZ_EXAMPLES=n raises the number of examples of every fuzzed test, makes them new on each run, and gives each
more rows: rows like those that are drawn, with other numbers (`MOST_ALIKE`). `num_rows` says how many there were.
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

FUZZING = _EXAMPLES is not None
MOST_ALIKE = 16 if FUZZING else 1
"""Rows of one landscape and one set of parameters in an example."""
SMALL = 1000
"""Vocabularies up to this size get rows that are alike: a large one costs the oracle as much as a hundred of these."""
VOCABULARIES = (1, 2, 31, 32, 33, 257, 32001)
DTYPES = ("float32", "float16", "bfloat16")
LANDSCAPES = (
    "normal", "flat", "steep", "ties", "few_values", "plateau", "zeros", "holes", "one_hot", "near_ties",
    "denormal", "huge", "masked", "wide_plateau", "steps", "ulps", "smallest", "extremes", "halves", "zipf",
    "above_one",
)  # fmt: skip
FAR = ("far_ulps",)
"""Differences that a logit divided by its temperature has lost: for kernels that subtract first."""


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
    if kind == "wide_plateau":  # ties over most of the vocabulary, under a few that are likelier
        x[:] = np.where(rng.random(size) < 0.9, np.float32(-1), x)
        return x
    if kind == "steps":  # plateaus of every width
        return np.sort(rng.integers(0, 1 + size // 7, size)).astype(np.float32)[rng.permutation(size)] / np.float32(3)
    if kind in ("ulps", "far_ulps"):  # neighbours among the float32
        sizes = [1e30, 1e38] if kind == "far_ulps" else [1e-30, 1e-3, 1.0, 300.0]
        base = np.float32(rng.choice(sizes) * rng.choice([-1, 1]))
        return (base.view(np.int32) + rng.integers(-3, 4, size).astype(np.int32)).view(np.float32)
    if kind == "smallest":  # the smallest numbers there are, of both signs
        return (rng.integers(-4, 5, size) * 2.0**-149).astype(np.float32)
    if kind == "extremes":
        ends = np.array([np.finfo(np.float32).min, -1e30, -0.0, 0.0, 1e30, np.finfo(np.float32).max], np.float32)
        return rng.choice(ends, size)
    if kind == "halves":  # masses 1/2, 1/4, 1/8, ..., whose sums end at a top_p of 0.5 to the last bit
        return (-np.log(2.0) * rng.permutation(size)).astype(np.float32)
    if kind == "zipf":
        return -np.log1p(rng.permutation(size)).astype(np.float32)
    if kind == "above_one":  # probabilities that each round up in float32, so that their sum lies above 1
        likely = np.arange(size) < rng.integers(1, size + 1)
        return np.where(likely, np.log(np.float32(1 / 3)), np.float32(-40)).astype(np.float32)
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
    st.sampled_from([0.0, 1e-6, 9.99e-6, 1e-5, 1.1e-5, 1e-3, 0.1, 0.7, 1.0, 1.0, 2.0, 100.0, 1e6, 1e30]),
    st.floats(0.05, 5.0),
)
top_ps = st.one_of(st.sampled_from([1.0, 1 - 2**-24, 0.999999, 0.95, 0.9, 0.75, 0.5, 0.1, 1e-6]), st.floats(1e-3, 1.0))
min_ps = st.one_of(st.just(0.0), st.just(0.0), st.sampled_from([1e-6, 0.05, 0.5, 0.999]), st.floats(0.0, 0.99))
unit = st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0.0, 1.0, exclude_max=True))


num_rows = 0
"""Rows that `row_batches` has made, those of shrinking included."""


def alike(size):
    """How many rows of a kind an example has."""
    return st.integers(1, MOST_ALIKE if size <= SMALL else 1)


def row_kinds(size):
    """What rows that are alike share: a landscape, what spoils the first of them, and parameters."""
    top_ks = st.sampled_from([0, 0, 1, 2, 3, 5, 20, 64, 1024, max(size - 1, 1), size, size + 10])
    poisons = st.sampled_from([None] * 12 + ["nan", "-nan", "inf", "empty"])
    return st.tuples(st.sampled_from(LANDSCAPES + FAR), poisons, temperatures, top_ks, top_ps, min_ps)


@st.composite
def row_batches(draw, kinds=None, vocabularies=VOCABULARIES, copies=None):
    """A batch of unlike rows over one vocabulary.

    kinds: rows that are unlike each other; None: 1 to 5. copies: how often they follow each other, each time with other
    numbers; None: `alike`.
    """
    global num_rows
    size = draw(st.sampled_from(vocabularies))
    drawn = draw(st.lists(row_kinds(size), min_size=kinds or 1, max_size=kinds or 5))
    copies = draw(alike(size)) if copies is None else copies
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    names, poisons, *parameters = zip(*drawn, strict=True)
    x = np.stack([landscape(name, size, rng) for _ in range(copies) for name in names])
    for row, poison in enumerate(poisons):
        if poison == "empty":
            x[row] = -np.inf
        elif poison is not None:
            values = {"nan": np.nan, "-nan": np.copysign(np.nan, -1), "inf": np.inf}
            x[row, rng.integers(size)] = values[poison]
    kinds_of = zip(parameters, (np.float32, np.int32, np.float32, np.float32), strict=True)
    temperature, top_k, top_p, min_p = (np.tile(np.array(values, kind), copies) for values, kind in kinds_of)
    num_rows += len(x)
    top_p, min_p = np.maximum(top_p, np.float32(1e-6)), np.minimum(min_p, np.float32(0.999))
    return Rows(cast(x, dtype), temperature, top_k, top_p, min_p)
