"""CUDA instructions that Numba doesn't offer, on pointers. One file, so that a change of compiler finds them all."""

from functools import lru_cache

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I16, _I32, _I64, _FLOAT, _DOUBLE = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
_WORDS = types.UniTuple(types.uint32, 4)


def _load16(cache: str):
    instruction = f"ld.global{cache}.v4.u32 {{$0, $1, $2, $3}}, [$4];"

    @intrinsic
    def load(typing_context, words, index):
        """Four words from words + 4*index, a 16-byte boundary."""

        def codegen(context, builder, signature, args):
            address = builder.ptrtoint(builder.gep(args[0], [builder.shl(args[1], args[1].type(2))]), _I64)
            result = ir.LiteralStructType([_I32] * 4)
            form = ir.FunctionType(result, [_I64])
            loaded = builder.asm(form, instruction, "=r,=r,=r,=r,l", [address], True)
            items = [builder.extract_value(loaded, i) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, items)

        return _WORDS(words, types.int64), codegen

    return load


@lru_cache
def load_four(stride: int):
    """An intrinsic (words, index, left) -> 16 words: four vectors of four words, `stride` vectors apart.

    The first is at words + 4*index. Only vectors up to `left` ones further are read; the others' words are anything.
    They are read once: no need to keep them near.
    """
    lines = ["{", ".reg .pred %p;"]
    for i in range(4):
        words = ", ".join(f"${4 * i + j}" for j in range(4))
        lines += [
            f"setp.ge.s32 %p, $17, {i * stride};",
            f"@%p ld.global.L1::no_allocate.v4.u32 {{{words}}}, [$16+{16 * i * stride}];",
        ]
    instructions = "\n".join([*lines, "}"])

    @intrinsic
    def load(typing_context, words, index, left):
        def codegen(context, builder, signature, args):
            address = builder.ptrtoint(builder.gep(args[0], [builder.shl(args[1], args[1].type(2))]), _I64)
            form = ir.FunctionType(ir.LiteralStructType([_I32] * 16), [_I64, _I32])
            loaded = builder.asm(form, instructions, ",".join(["=&r"] * 16 + ["l", "r"]), [address, args[2]], True)
            return context.make_tuple(
                builder, signature.return_type, [builder.extract_value(loaded, i) for i in range(16)]
            )

        return types.UniTuple(types.uint32, 16)(words, types.int64, types.int32), codegen

    return load


def _packed_max(kind: str):
    """The larger of each 16-bit half; NaN if either is."""

    @intrinsic
    def larger(typing_context, a, b):
        def codegen(context, builder, signature, args):
            form = ir.FunctionType(_I32, [_I32, _I32])
            return builder.asm(form, f"max.NaN.{kind} $0, $1, $2;", "=r,r,r", args, False)

        return types.uint32(types.uint32, types.uint32), codegen

    return larger


@intrinsic
def max_float32(typing_context, a, b):
    """The larger of two float32 given and returned as bits; NaN if either is."""

    def codegen(context, builder, signature, args):
        form = ir.FunctionType(_FLOAT, [_FLOAT, _FLOAT])
        values = [builder.bitcast(word, _FLOAT) for word in args]
        return builder.bitcast(builder.asm(form, "max.NaN.f32 $0, $1, $2;", "=f,f,f", values, False), _I32)

    return types.uint32(types.uint32, types.uint32), codegen


@intrinsic
def half_to_float(typing_context, bits):
    """The float32 of the float16 in the low half of a word; exact."""

    def codegen(context, builder, signature, args):
        half = builder.trunc(args[0], _I16)
        return builder.asm(ir.FunctionType(_FLOAT, [_I16]), "cvt.f32.f16 $0, $1;", "=f,h", [half], False)

    return types.float32(types.uint32), codegen


@intrinsic
def float_to_half(typing_context, value):
    """The bits of the float16 nearest to a float32, in the low half of a word."""

    def codegen(context, builder, signature, args):
        half = builder.asm(ir.FunctionType(_I16, [_FLOAT]), "cvt.rn.f16.f32 $0, $1;", "=h,f", [args[0]], False)
        return builder.zext(half, _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def divide_approximately(typing_context, a, b):
    """a/b of two float32 within 2 units in the last place, for b in 2^-126..2^126."""

    def codegen(context, builder, signature, args):
        form = ir.FunctionType(_FLOAT, [_FLOAT, _FLOAT])
        return builder.asm(form, "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", args, False)

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def exp2_approximate(typing_context, value):
    """2^value of a float32 with a relative error of up to 2^-22; denormal results are 0."""

    def codegen(context, builder, signature, args):
        return builder.asm(ir.FunctionType(_FLOAT, [_FLOAT]), "ex2.approx.ftz.f32 $0, $1;", "=f,f", args, False)

    return types.float32(types.float32), codegen


@intrinsic
def add_at(typing_context, pointer, index, value):
    """Atomic pointer[index] += value; returns what was there."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "monotonic")

    return pointer.dtype(pointer, types.int64, pointer.dtype), codegen


@intrinsic
def take_ticket(typing_context, pointer, index):
    """Atomic pointer[index] += 1 on int64; returns what was there.

    What was written before it, by the thread or by others before a barrier, is seen by who takes a later ticket.
    """

    def codegen(context, builder, signature, args):
        address = builder.ptrtoint(builder.gep(args[0], [args[1]]), _I64)
        form = ir.FunctionType(_I64, [_I64])
        return builder.asm(form, "atom.acq_rel.gpu.global.add.u64 $0, [$1], 1;", "=l,l,~{memory}", [address], True)

    return types.int64(pointer, types.int64), codegen


@intrinsic
def make_known(typing_context, pointer, index, value):
    """pointer[index] = value on float64, for blocks that ask by `what_is_known`; it says nothing of other writes."""

    def codegen(context, builder, signature, args):
        address = builder.ptrtoint(builder.gep(args[0], [args[1]]), _I64)
        form = ir.FunctionType(ir.VoidType(), [_I64, _DOUBLE])
        builder.asm(form, "st.relaxed.gpu.global.f64 [$0], $1;", "l,d", [address, args[2]], True)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float64), codegen


@intrinsic
def what_is_known(typing_context, pointer, index):
    """pointer[index] on float64 as it is now, whichever block wrote it by `make_known`."""

    def codegen(context, builder, signature, args):
        address = builder.ptrtoint(builder.gep(args[0], [args[1]]), _I64)
        form = ir.FunctionType(_DOUBLE, [_I64])
        return builder.asm(form, "ld.relaxed.gpu.global.f64 $0, [$1];", "=d,l", [address], True)

    return types.float64(pointer, types.int64), codegen


@intrinsic
def fetch_early(typing_context, pointer, index):
    """Ask for pointer[index] to come to the L2 cache; nobody waits for it."""

    def codegen(context, builder, signature, args):
        address = builder.ptrtoint(builder.gep(args[0], [args[1]]), _I64)
        builder.asm(ir.FunctionType(ir.VoidType(), [_I64]), "prefetch.global.L2 [$0];", "l", [address], True)
        return context.get_dummy_value()

    return types.void(pointer, types.int64), codegen


def _warp_reduction(operation: str):
    """The reduction of a word over the whole warp, in every lane."""

    @intrinsic
    def reduce(typing_context, value):
        def codegen(context, builder, signature, args):
            form = ir.FunctionType(_I32, [_I32])
            call = builder.asm(form, f"redux.sync.{operation} $0, $1, 0xffffffff;", "=r,r", args, True)
            call.attributes.add("convergent")  # every lane takes part: it may not move into a branch
            return call

        return value(value), codegen

    return reduce


warp_max_u32, warp_min_u32, warp_sum_s32 = (_warp_reduction(name) for name in ("max.u32", "min.u32", "add.s32"))
load_kept = _load16("")  # read again soon
max_bfloat16x2, max_float16x2 = _packed_max("bf16x2"), _packed_max("f16x2")
