"""The arithmetic of replay that both compilers share, in float64: an exponential, a logarithm, the order of a sum.

The mathematical libraries of the two processors differ in the last bit, so both functions are computed here.

A row's sum has LANES partial sums, entry i of the row in partial sum i mod LANES, added up as a balanced tree over
neighbours: what a block of LANES threads does, and the host with it.
"""

import numpy as np
from numba import njit

from gpu.instructions import fma, product
from gpu.weights import log64

LANES = 128

_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_LN2_HIGH = float.fromhex("0x1.62e42fefa38p-1")  # its low bits are zero: a product with an exponent is exact
_LN2_LOW = float.fromhex("0x1.ef35793c7673p-45")
_TO_INTEGER = 1.5 * 2.0**52  # a sum with it is rounded to an integer
# 1/n! from n = 13 down to 2: on [-ln 2 / 2, ln 2 / 2] the series is right to 5e-18.
_FIRST = 1.0 / 6227020800
_EXP = tuple(1.0 / n for n in (479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2))


@njit(nogil=True, error_model="numpy")
def exp64(x):
    """The exponential of a float64, within 1 ulp, the same bits on every processor. -inf gives 0, NaN NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r + r^2 (1/2 + r/6 + ...), its Taylor series.
    """
    if not x > -746.0:  # less than half the least float64
        return x if x != x else 0.0
    if x > 710.0:
        return np.inf
    n = (product(x, _LOG2_E) + _TO_INTEGER) - _TO_INTEGER
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, x))
    series = _FIRST
    for term in _EXP:
        series = fma(series, r, term)
    power = fma(product(r, r), series, r) + 1.0
    # In two steps, so that a result below 2^-1022 is rounded once.
    exponent = np.int64(n)
    half = exponent >> np.int64(1)
    low = np.int64((half + np.int64(1023)) << np.int64(52)).view(np.float64)
    high = np.int64((exponent - half + np.int64(1023)) << np.int64(52)).view(np.float64)
    return product(product(power, low), high)


@njit(nogil=True, error_model="numpy")
def log1p64(x):
    """log(1 + x) of a float64 from 0, within a few ulp also where x is tiny, the same bits on every processor.

    Of u = fl(1 + x), with what the sum lost added to first order: log u + (x - (u - 1)) / u.
    """
    if not x < np.inf:
        return x
    u = 1.0 + x
    return log64(u) + (x - (u - 1.0)) / u


@njit(nogil=True, error_model="numpy")
def logit_gradient(grad_entry, entry, grad_total, temperature):
    """The gradient by a logit of the support: (g - exp(entry) * sum of g) / T."""
    return (grad_entry - product(exp64(entry), grad_total)) / temperature


@njit(nogil=True)
def tree_sum(lanes):
    """The sum of LANES partial sums, which it uses as its scratch."""
    step = 1
    while step < LANES:
        for lane in range(0, LANES, 2 * step):
            lanes[lane] += lanes[lane + step]
        step *= 2
    return lanes[0]
