"""What a scan says of the rows' masses: held against the exact ones, and against float64 sums of exponentials."""

from contextlib import ExitStack
from functools import lru_cache
from unittest import mock

import numpy as np
from numba import cuda, int64, void

from gpu.device.launch import Kernel, pointer, pointer_to
from gpu.device.memory import device_logits, empty
from gpu.device.vectors import format_of
from gpu.support import device as support_device
from gpu.support.estimate import mass_between_of
from gpu.support.levels import Scale
from gpu.support.marks import MARKS
from gpu.support.policy import ROWS, rows_argument
from gpu.support.whole import WHOLE, top_of, whole_argument
from gpu.weights import HOTTEST, ONE, split_scale
from tests import naive
from tests.backends import HOST
from tests.strategies import FAR, LANDSCAPES, cast, landscape

WARP = 32


@lru_cache
def between_kernel(name):
    """A kernel (marks, rows, whole, out int64 [R, 2]) over (R,) blocks of a warp: the bounds of each row's mass."""
    mass_between, value_of = mass_between_of(name), format_of(name).value

    def between(marks, rows, whole, out):
        index = np.int32(cuda.blockIdx.x)
        c_hi, c_lo = split_scale(rows.temperature[index])
        maximum = np.float32(value_of(top_of(marks, index)) + np.float32(0.0))
        low, high = mass_between(marks, whole.estimates, index, Scale(maximum, np.float32(c_hi), np.float32(c_lo)))
        if cuda.threadIdx.x == 0:
            out[2 * np.int64(index)], out[2 * np.int64(index) + 1] = low, high

    return Kernel(between, void(MARKS, ROWS, WHOLE, pointer_to(int64)), WARP)


def bounds_of(up, down, logits, temperature):
    """int64 [R, 2]: between what the mass of each row of logits [R, V] lies; 0, 0 where nobody knows."""
    own = up(logits)  # a kernel's argument keeps no memory alive
    rows = device_logits(own, 2)
    number = rows.num_rows
    bounds = up(np.zeros(number, np.int32)), up(np.full(number, 0.5, np.float32)), up(np.zeros(number, np.float32))
    support, marks, of_filter = support_device.filter_arguments(rows, up(temperature), *bounds, False, 1, None)
    walk = support_device.walk_of(support)
    of_rows, whole = rows_argument(support), whole_argument(walk)
    grid = (number * marks.chunks,)
    support_device.scan_kernel(rows.form.name, True).launch(grid, rows.argument, marks, of_filter, of_rows, whole)
    out = empty((number, 2), np.int64)
    between_kernel(rows.form.name).launch((number,), marks, of_rows, whole, pointer(out))
    return down(out)


def check(up, down, x, dtype, temperature):
    """Rows of float32 logits [R, V], a temperature each: the bounds hold. Returns which are known."""
    logits, temperature = cast(x, dtype), np.asarray(temperature, np.float32)
    low, high = bounds_of(up, down, logits, temperature).T
    everything = HOST.select_support(
        logits, temperature, np.zeros(len(x), np.int32), np.ones(len(x), np.float32), capacity=1
    )
    mass, known = everything.total.astype(np.int64), low > 0
    assert (low <= mass)[known].all()
    assert (mass <= high)[known].all()
    assert (high - low < mass * 2.0**-15)[known].all()
    for row in np.flatnonzero(known):
        values = naive.decode(logits[row])
        exact = np.exp((values - values.max()) / float(temperature[row])).sum()
        assert low[row] / ONE < exact * (1 + 1e-6) + 2.0**-24
        assert exact * (1 - 1e-6) < high[row] / ONE + 2.0**-24
    return known


def check_landscapes(up, down, dtype, size, seed, each=1):
    """`each` rows of every kind, at temperatures from where rows are no longer greedy to the hottest there is a bound
    for."""
    rng = np.random.default_rng(seed)
    temperatures = np.array([1.1e-5, 1e-3, 0.3, 1, 1, 2.5, 100, 1e6, HOTTEST])
    kinds = [*LANDSCAPES, *FAR]
    x = np.stack([landscape(kind, size, rng) for kind in kinds for _ in range(each)])
    picked = rng.choice(temperatures, len(x))
    known = check(up, down, x, dtype, picked)
    tame = [kind in ("normal", "ties", "holes", "zipf", "steps", "halves") for kind in kinds for _ in range(each)]
    assert known[np.array(tame) & (picked >= 0.3)].all()


def check_what_cant_be_known(up, down):
    """Where logits times 1/T leave float32, nothing is said; nor is a row of -inf's mass more than 0."""
    x = np.array([[3e38, 3e38, 1, 0] * 20, [30, 29, 28, -np.inf] * 20, [-np.inf] * 80], np.float32)
    known = check(up, down, x[:2], "bfloat16", [1e-2, 1.1e-5])
    assert known.tolist() == [False, True]
    bounds = bounds_of(up, down, x[2:], np.ones(1, np.float32))
    assert bounds[0, 0] == 0


def check_worst_rounding(up, down, dtype):
    """In the simulator: every exponential and every quotient as wrong as they may be, all to one side."""
    from gpu.support import estimate, scan

    rng = np.random.default_rng(8)
    x = np.stack([landscape(kind, 900, rng) for kind in ("normal", "zipf", "ties")])
    exp2, divide = estimate.exp2_approximate, scan.divide_approximately
    for side in (-1, 1):
        with ExitStack() as stack:
            wrong_exp2 = lambda value, side=side: np.float32(exp2(value) * np.float32(1 + side * 2.0**-22))  # noqa: E731
            wrong = lambda a, b, side=side: np.float32(divide(a, b) * np.float32(1 + side * 2.0**-22))  # noqa: E731
            stack.enter_context(mock.patch.object(estimate, "exp2_approximate", wrong_exp2))
            stack.enter_context(mock.patch.object(scan, "divide_approximately", wrong))
            assert check(up, down, x, dtype, [0.7, 1, 0.2]).all()
