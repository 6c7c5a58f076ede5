"""The arithmetic that every kernel shares: from a logit to an integer weight.

    weight(x) = trunc(2^44 * exp((x - m) / T)),   m the row's maximum, T its temperature

in float32 with explicit fused multiply-adds, so that the CPU and the CUDA twins give the same integer:

    d = x - m;  c = log2(e)/T = c_hi + c_lo
    t_hi = d*c_hi;  t_lo = fma(d, c_lo, fma(d, c_hi, -t_hi))
    n = rint(t_hi);  f = (t_hi - n) + t_lo;  2^f = 1 + f*poly(f)

The maximum weighs exactly 2^44, and what is below 2^-44 weighs 0. A vocabulary has at most 2^18 tokens, so
every mass fits in 63 bits; masses are integer sums, exact and independent of their order. Loops count in
int64, because NumPy and Numba turn a mix of int64 and uint64 into float64.

On CUDA `t_hi` needs a multiplication that the compiler can't contract (`fmul_rn`).
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

ONE_LOG2 = 44
ONE = 1 << ONE_LOG2  # the weight of the maximum
MAX_VOCABULARY = 1 << 18
GREEDY_TEMPERATURE = np.float32(1e-5)  # a row with a lower temperature is greedy
LOWEST = np.float32(np.finfo(np.float32).min)  # x >= LOWEST iff x > -inf
LOWEST_KEY = np.int32(-0x7F800000)
KEY_PLUS_INF = np.int32(0x7F800000)
KEY_MINUS_INF = np.int32(-0x7F800001)

_LOG2_E = math.log2(math.e)
_T_MIN = np.float32(-45.0)
_ZERO = np.float32(0.0)
_EXPONENT_BIAS = np.int32(127 + ONE_LOG2)
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


@intrinsic
def fma(typing_context, a, b, c):
    """a*b + c in float32, rounded once."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def rint(typing_context, a):
    """The nearest integer of a float32, halves to even."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [ir.FloatType()], kind), args)

    return types.float32(types.float32), codegen


@njit(nogil=True, error_model="numpy")
def split_scale(temperature):
    """log2(e)/T as the float32 pair (c_hi, c_lo)."""
    scale = _LOG2_E / np.float64(temperature)
    c_hi = np.float32(scale)
    return c_hi, np.float32(scale - np.float64(c_hi))


@njit(nogil=True, error_model="numpy")
def weight(x, maximum, c_hi, c_lo):
    """The weight of float32 logit x (int64, 0..2^44). -inf weighs 0."""
    d = np.float32(x) - np.float32(maximum)
    t_hi = d * np.float32(c_hi)
    alive = t_hi >= _T_MIN
    if not alive:  # also -inf: nothing below may see it
        d = _ZERO
        t_hi = _ZERO
    t_lo = fma(d, c_lo, fma(d, c_hi, -t_hi))  # type: ignore[call-arg, var-annotated]
    n = rint(t_hi)
    f = (t_hi - n) + t_lo
    power = fma(f, _C6, _C5)
    power = fma(power, f, _C4)
    power = fma(power, f, _C3)
    power = fma(power, f, _C2)
    power = fma(power, f, _C1)
    power = fma(power, f, np.float32(1.0))
    scale = np.int32((np.int32(n) + _EXPONENT_BIAS) << np.int32(23)).view(np.float32)
    fixed = np.int64(power * scale)
    return fixed if alive else np.int64(0)


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
def log_probability(x, maximum, temperature, total):
    """(x - m)/T - log(total / 2^44) in float64, rounded to float32; finite, however unlikely a kept token."""
    scaled = (np.float64(x) - np.float64(maximum)) / np.float64(temperature)
    return np.float32(max(scaled - math.log(np.float64(total) * (1.0 / ONE)), np.float64(LOWEST)))
