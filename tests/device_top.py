"""top_logprobs of device arrays against its host twin: cases for the simulator and for a device.

`up` makes an array the device's, `down` brings it back.
"""

from dataclasses import dataclass

import numpy as np

from gpu import INVALID, select_support, top_logprobs
from tests.strategies import cast, landscape


@dataclass
class Case:
    """Rows of these kinds, with one set of parameters."""

    kinds: tuple[str, ...]
    size: int
    dtype: str
    k: int
    capacity: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    lead: int = 0  # elements in front of each row and behind it
    pad: int = 0


CASES = {
    "ties cut by id": Case(("ties", "few_values"), 257, "float32", 20),
    "odd rows": Case(("normal", "holes"), 331, "bfloat16", 7, lead=3, pad=2),
    "one of eight granules": Case(("normal", "steep"), 2000, "float32", 5, lead=1),
    "one of eight granules of halves": Case(("normal", "ties"), 1999, "float16", 3),
    "more than the support": Case(("one_hot", "masked", "denormal"), 33, "float16", 40),
    "its own entries": Case(("normal", "ties"), 300, "float32", 20, capacity=64, top_k=12),
    "cut by top-p": Case(("normal", "near_ties"), 500, "float32", 30, capacity=8, top_p=0.5),
    "many binades": Case(("spread", "spread"), 1000, "float16", 100),
    "many binades of float32": Case(("spread",), 1000, "float32", 110),
    "all": Case(("normal",), 900, "bfloat16", 1000),
    "a plateau": Case(("plateau", "zeros"), 2500, "float32", 33, lead=1),
    "a plateau under a peak": Case(("peak",), 2700, "bfloat16", 40),
    "near ties": Case(("near_ties",), 2600, "float32", 700),
    "one token": Case(("normal", "zeros"), 1, "float32", 2),
}


def _row(kind, size, rng):
    if kind == "spread":  # of both signs, over many powers of two
        return (rng.choice([-1, 1], size) * 2.0 ** rng.uniform(-14, 15, size)).astype(np.float32)
    if kind == "peak":  # a few tokens over both zeros
        x = landscape("zeros", size, rng)
        x[rng.choice(size, 30, replace=False)] = 1.5
        return x
    return landscape(kind, size, rng)


def _bits(array):
    return np.ascontiguousarray(array).view(np.int32)


def check(up, down, x, parameters, k, rows, capacity=1, lead=0, pad=0):
    """Ids and log-probabilities bit for bit the host's. x [R, V]: on the device as a part of wider rows."""
    wide = np.zeros((len(x), lead + x.shape[1] + pad), x.dtype)
    wide[:, lead : lead + x.shape[1]] = x
    device_x = up(wide)[:, lead : lead + x.shape[1]]
    on_host = select_support(x, *parameters, capacity=capacity)
    on_device = select_support(device_x, *map(up, parameters), capacity=capacity)
    want = top_logprobs(x, on_host, k, rows)
    out = up(np.zeros((rows.size, k), np.int32)), up(np.zeros((rows.size, k), np.float32))
    got = top_logprobs(device_x, on_device, k, up(rows), out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(_bits(down(ours)), _bits(theirs))


def check_case(up, down, name):
    case = CASES[name]
    rng = np.random.default_rng(sorted(CASES).index(name))
    x = cast(np.stack([_row(kind, case.size, rng) for kind in case.kinds]), case.dtype)
    num = len(x)
    parameters = (
        np.full(num, case.temperature, np.float32),
        np.full(num, case.top_k, np.int32),
        np.full(num, case.top_p, np.float32),
    )
    rows = np.arange(num)[::-1].astype(np.int64)
    check(up, down, x, parameters, case.k, rows, case.capacity, case.lead, case.pad)


def check_kinds_of_rows(up, down):
    """Greedy, INVALID, asked for twice, not at all, out of range; logits [B, W, V], rows int32."""
    x = np.random.default_rng(3).normal(size=(4, 70)).astype(np.float32)
    x[1, 60] = x[1, 7] = 9.0
    x[2, 5] = np.nan
    parameters = (
        np.array([1.0, 0.0, 1.0, 0.5], np.float32),
        np.array([0, 0, 0, 1], np.int32),
        np.ones(4, np.float32),
    )
    rows = np.array([2, 1, 1, 3], np.int32)
    want = top_logprobs(x, select_support(x, *parameters, capacity=4), 3, rows)
    support = select_support(up(x), *map(up, parameters), capacity=4)
    assert down(support.status)[2] == INVALID
    asked = up(np.concatenate([rows, np.array([-1, 4], np.int32)]))
    ids, values = (down(array) for array in top_logprobs(up(x.reshape(2, 2, 70)), support, 3, asked))
    np.testing.assert_array_equal(ids[:4], want[0])
    np.testing.assert_array_equal(_bits(values[:4]), _bits(want[1]))
    assert ids[1].tolist() == [7, -1, -1]
    assert (ids[[0, 4, 5]] == -1).all()
    assert (values[[0, 4, 5]] == -np.inf).all()


def check_arguments(up):
    """Yields what must be refused: a call, and what its message matches."""
    x = up(np.zeros((2, 40), np.float32))
    one, none = up(np.ones(2, np.float32)), up(np.zeros(2, np.int32))
    support = select_support(x, one, none, one, capacity=2)
    rows = up(np.zeros(3, np.int64))
    outs = up(np.zeros((3, 2), np.int32)), up(np.zeros((3, 2), np.float64))
    host = np.zeros((2, 40), np.float32)
    on_host = select_support(host, np.ones(2, "f4"), np.zeros(2, "i4"), np.ones(2, "f4"), capacity=2)
    yield lambda: top_logprobs(x, support, 1025, rows), "k=1025, expected at most 1024 on a device"
    yield lambda: top_logprobs(x, support, 2, np.zeros(3, np.int64)), "rows=int64.3., expected a CuPy array int32 or"
    yield lambda: top_logprobs(x, support, 2, up(np.zeros(3))), "rows=float64.3., expected a CuPy array int32 or"
    yield lambda: top_logprobs(x, support, 2, rows, out=outs), r"out\[1\]=float64\[3, 2\], expected .* float32\[3, 2\]"
    yield lambda: top_logprobs(x[:1], support, 2, rows), "support rows=2, expected 1"
    yield lambda: top_logprobs(x, on_host, 2, rows), "support.walk=None, expected a Support"
