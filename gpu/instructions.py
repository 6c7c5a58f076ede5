"""Single instructions that both compilers must emit as written: no contraction, no other rounding.

Numba compiles the same kernel helpers for the CPU and for CUDA. LLVM keeps float operations apart on the CPU;
the CUDA compiler may fuse a product into the sum that follows it, so `product` names the rounded one there.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()


def _cuda(builder) -> bool:
    return builder.module.triple.startswith("nvptx")


@intrinsic
def fma(typing_context, a, b, c):
    """a*b + c of three float32 or three float64, rounded once."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return a(a, b, c), codegen


@intrinsic
def product(typing_context, a, b):
    """a*b of two float32 or two float64, rounded before anything else sees it."""

    def codegen(context, builder, signature, args):
        if not _cuda(builder):
            return builder.fmul(*args)
        kind = args[0].type
        name, letter = ("f32", "f") if kind == _FLOAT else ("f64", "d")
        form = ir.FunctionType(kind, [kind, kind])
        return builder.asm(form, f"mul.rn.{name} $0, $1, $2;", f"={letter},{letter},{letter}", args, False)

    return a(a, b), codegen


@intrinsic
def rint(typing_context, a):
    """The nearest integer of a float32, halves to even."""

    def codegen(context, builder, signature, args):
        form = ir.FunctionType(_FLOAT, [_FLOAT])
        if _cuda(builder):
            return builder.asm(form, "cvt.rni.f32.f32 $0, $1;", "=f,f", args, False)
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [_FLOAT], form), args)

    return types.float32(types.float32), codegen
