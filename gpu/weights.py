"""The arithmetic that every kernel shares: from a logit to an integer weight.

    weight(x) = trunc(2^44 * exp((x - m) / T)),   m the row's maximum, T its temperature

in float32 with explicit fused multiply-adds, so that the CPU and the CUDA twins give the same integer:

    d = x - m;  c = log2(e)/T = c_hi + c_lo
    t_hi = d*c_hi;  t_lo = fma(d, c_lo, fma(d, c_hi, -t_hi))
    n = rint(t_hi);  f = (t_hi - n) + t_lo;  2^f = 1 + f*poly(f)

The maximum weighs exactly 2^44, and what is below 2^-44 weighs 0. A vocabulary has at most 2^18 tokens, so
every mass fits in 63 bits; masses are integer sums, exact and independent of their order. Loops count in
int64, because NumPy and Numba turn a mix of int64 and uint64 into float64.

Both compilers must round every step alike: `product`, `fma` and `rint` are in gpu/instructions.py. Logarithms are
computed here too, because the two mathematical libraries differ in the last bit.
"""

import math

import numpy as np
from numba import njit

from gpu.instructions import fma, product, rint

ONE_LOG2 = 44
ONE = 1 << ONE_LOG2  # the weight of the maximum
MAX_VOCABULARY = 1 << 18
GREEDY_TEMPERATURE = np.float32(1e-5)  # a row with a lower temperature is greedy
HOTTEST = np.float32(1e30)  # see least_difference
LOWEST = np.float32(np.finfo(np.float32).min)  # x >= LOWEST iff x > -inf
LOWEST_KEY = np.int32(-0x7F800000)
KEY_PLUS_INF = np.int32(0x7F800000)
KEY_MINUS_INF = np.int32(-0x7F800001)

_LOG2_E = math.log2(math.e)
_T_MIN = np.float32(-45.0)
_ZERO = np.float32(0.0)
_EXPONENT_BIAS = np.int32(127 + ONE_LOG2)
_UNIT_BITS = np.int32((127 + ONE_LOG2) << 23)
_SHIFT = np.float32(1.5 * 2**23)
# Minimax of (2^f - 1)/f on [-1/2, 1/2], degree 5: relative error of 2^f below 2e-9 before rounding.
_C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(c)
    for c in (
        0.6931472,
        0.24022648,
        0.055503324,
        0.009618437,
        0.0013398875,
        0.00015353362,
    )
)
_SQRT_HALF_BITS = np.int64(0x3FE6A09E667F3BCD)
_LN2_HIGH = float.fromhex("0x1.62e42fefa38p-1")  # its low bits are zero: a product with an exponent is exact
_LN2_LOW = float.fromhex("0x1.ef35793c7673p-45")
_ATANH = tuple(1.0 / n for n in range(21, 1, -2))


@njit(nogil=True, error_model="numpy")
def split_scale(temperature):
    """log2(e)/T as the float32 pair (c_hi, c_lo)."""
    scale = _LOG2_E / np.float64(temperature)
    c_hi = np.float32(scale)
    return c_hi, np.float32(scale - np.float64(c_hi))


@njit(nogil=True)
def _power_of_two(f):
    # 2^f, f in [-1/2, 1/2].
    power = fma(f, _C6, _C5)
    power = fma(power, f, _C4)
    power = fma(power, f, _C3)
    power = fma(power, f, _C2)
    power = fma(power, f, _C1)
    return fma(power, f, np.float32(1.0))


@njit(nogil=True, error_model="numpy")
def weight(x, maximum, c_hi, c_lo):
    """The weight of float32 logit x (int64, 0..2^44). -inf weighs 0."""
    d = np.float32(x) - np.float32(maximum)
    t_hi = product(d, np.float32(c_hi))
    alive = t_hi >= _T_MIN
    if not alive:  # also -inf: nothing below may see it
        d = _ZERO
        t_hi = _ZERO
    t_lo = fma(d, np.float32(c_lo), fma(d, np.float32(c_hi), -t_hi))
    n = rint(t_hi)
    f = (t_hi - n) + t_lo
    scale = np.int32((np.int32(n) + _EXPONENT_BIAS) << np.int32(23)).view(np.float32)
    fixed = np.int64(_power_of_two(f) * scale)
    return fixed if alive else np.int64(0)


@njit(nogil=True, error_model="numpy")
def least_difference(c_hi):
    """A difference x - m of weight 0, from which on `weight_of_difference` may be asked; of temperatures to HOTTEST."""
    return np.float32(np.float32(-100.0) / np.float32(c_hi))


@njit(nogil=True)
def weight_of_difference(d, c_hi, c_lo):
    """weight(m + d) in fewer instructions, for loops that do nothing else: d = x - m, not below least_difference.

    Nothing needs a test there: the exponent stays in its range, and what is too small truncates to 0. The integer
    nearest to t is what the low bits of 1.5 * 2^23 + t hold.
    """
    t_hi = product(d, np.float32(c_hi))
    t_lo = fma(d, np.float32(c_lo), fma(d, np.float32(c_hi), -t_hi))
    shifted = np.float32(t_hi + _SHIFT)
    f = (t_hi - np.float32(shifted - _SHIFT)) + t_lo
    scale = np.int32(np.int32(shifted.view(np.int32) << np.int32(23)) + _UNIT_BITS).view(np.float32)
    return np.int64(_power_of_two(f) * scale)


@njit(nogil=True)
def key_of(x):
    """An int32 in the order of the values: NaN above +inf or below -inf, -0.0 is -1, +0.0 is 0."""
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True)
def value_of(key):
    """The float32 of a key."""
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@njit(nogil=True)
def cutoff_key(cutoff):
    """The key k with: x >= cutoff iff key_of(x) >= k, for x not NaN. (-0.0 and +0.0 are one value.)"""
    return np.int32(-1) if cutoff == _ZERO else key_of(cutoff)


@njit(nogil=True, error_model="numpy")
def log64(x):
    """The natural logarithm of a positive normal float64, within 2 ulp, the same bits on every processor.

    x = 2^e * m with m in [sqrt(1/2), sqrt(2)); log m = 2*atanh(f), f = (m - 1)/(m + 1), as its Taylor series.
    """
    bits = np.float64(x).view(np.int64)
    exponent = np.int64((bits - _SQRT_HALF_BITS) >> np.int64(52))
    mantissa = np.int64(bits - (exponent << np.int64(52))).view(np.float64)
    e = np.float64(exponent)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    square = product(f, f)
    series = 1.0 / 23.0
    for term in _ATANH:
        series = fma(series, square, term)
    cubic = product(product(f, square), series)
    low = fma(e, _LN2_LOW, cubic + cubic)
    return fma(e, _LN2_HIGH, low + (f + f))


@njit(nogil=True, error_model="numpy")
def log_total(total):
    """log(total / 2^44): what every log-probability of a row subtracts."""
    return log64(np.float64(total) * (1.0 / ONE))


@njit(nogil=True, error_model="numpy")
def log_share(x, maximum, inverse_temperature, log_of_total):
    """(x - m) * (1/T) - log_total in float64, rounded to float32; finite, however unlikely a kept token.

    Which zero x is plays no part: -0.0 - 0.0 would be -0.0, and + 0.0 makes it 0.0.
    """
    scaled = product(np.float64(x) - np.float64(maximum), inverse_temperature)
    return np.float32(np.float32(max(scaled - log_of_total, np.float64(LOWEST))) + np.float32(0.0))


@njit(nogil=True, error_model="numpy")
def log_probability(x, maximum, temperature, total):
    """The log-probability of a kept token with logit x."""
    return log_share(x, maximum, 1.0 / np.float64(temperature), log_total(total))
