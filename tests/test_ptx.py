"""The PTX reader, on kernels of which the answers are known."""

import numpy as np
import pytest
from cuda.bindings import nvjitlink
from llvmlite import ir
from numba import cuda, njit, types
from numba.extending import intrinsic

from tests.ptx import analyse, compile_ptx

FLOATS, INTS = types.float32[::1], types.int32[::1]


@intrinsic
def load_16_bytes(typing_context, address):
    def codegen(context, builder, signature, args):
        words = [ir.IntType(32)] * 4
        kind = ir.FunctionType(ir.LiteralStructType(words), [ir.IntType(64)])
        load = "ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];"
        loaded = builder.call(ir.InlineAsm(kind, load, "=r,=r,=r,=r,l", side_effect=True), args)
        return context.make_tuple(builder, signature.return_type, [builder.extract_value(loaded, i) for i in range(4)])

    return types.UniTuple(types.int32, 4)(types.int64), codegen


@intrinsic
def fma(typing_context, a, b, c):
    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@njit
def square_plus_one(x):
    return fma(x, x, np.float32(1))


@cuda.jit
def loads_and_counts(address, out):
    histogram = cuda.shared.array(256, np.int32)
    odd = cuda.shared.array((3, 5), np.int64)
    i = cuda.threadIdx.x
    a, b, c, d = load_16_bytes(address + np.int64(i) * np.int64(16))
    cuda.atomic.add(histogram, a & np.int32(255), np.int32(1))
    cuda.atomic.max(out, b, c)
    odd[a & np.int32(1), d & np.int32(1)] = c
    cuda.syncthreads()
    out[i] = histogram[i] + np.int32(odd[0, 1])


def test_loads_shared_memory_and_atomics():
    facts = analyse(compile_ptx(loads_and_counts, (types.int64, INTS)))
    assert facts.num_16_byte_loads == 1
    assert facts.shared_bytes == 256 * 4 + 15 * 8
    assert facts.atomics == {"atom.shared.add.u32": 1, "atom.global.max.s32": 1}
    assert facts.num_f64 == facts.num_local == facts.num_loose_products == facts.spill_bytes == facts.stack_bytes == 0
    assert 8 <= facts.registers <= 40


def calls_njit(x, out):
    out[cuda.threadIdx.x] = square_plus_one(x[cuda.threadIdx.x])


def widens(x, out):
    out[cuda.threadIdx.x] = (x[cuda.threadIdx.x] + np.int32(1)) * 0.3


def adds_a_product(x, out):
    out[0] = x[0] * x[1] + x[2]


def subtracts_from_a_product(x, out):
    out[0] = x[0] * x[1] - x[2]


def subtracts_from_a_rounded_product(x, out):
    out[0] = cuda.libdevice.fmul_rn(x[0], x[1]) - x[2]


@pytest.mark.parametrize(
    ("kernel", "computes_in_f64", "num_fma", "num_loose_products"),
    [
        (calls_njit, False, 1, 0),
        (widens, True, 0, 1),
        (adds_a_product, False, 1, 0),
        (subtracts_from_a_product, False, 0, 1),
        (subtracts_from_a_rounded_product, False, 0, 0),
    ],
)
def test_float64_and_products_that_are_fused_or_may_be(kernel, computes_in_f64, num_fma, num_loose_products):
    facts = analyse(compile_ptx(kernel, (INTS if kernel is widens else FLOATS, FLOATS)))
    assert (facts.num_f64 > 0) == computes_in_f64
    assert (facts.num_fma, facts.num_loose_products) == (num_fma, num_loose_products)
    assert facts.num_16_byte_loads == facts.shared_bytes == 0


def keeps_a_table(x, out):
    table = cuda.local.array(64, np.float32)
    for i in range(64):
        table[i] = x[i] + x[64 - i]
    for i in range(64):
        x[i] = table[np.int32(x[i]) & np.int32(63)]
    out[0] = table[np.int32(x[0]) & np.int32(63)]


def keeps_many(x, out):
    kept = cuda.local.array(32, np.float32)
    for i in range(32):
        kept[i] = x[i]
    cuda.syncthreads()
    for i in range(32):
        out[i] = kept[i]
    cuda.syncthreads()
    for i in range(32):
        out[i] = kept[31 - i]


def test_local_memory_and_spills():
    local = analyse(compile_ptx(keeps_a_table, (FLOATS, FLOATS)))
    assert local.num_local > 1
    assert local.stack_bytes >= 256
    ptx = compile_ptx(keeps_many, (FLOATS, FLOATS))
    assert analyse(ptx).spill_bytes == 0
    capped = analyse(ptx, max_registers=24)
    assert capped.registers <= 24
    assert capped.spill_bytes > 0


def test_launch_bounds_reach_the_ptx():
    assert ".maxntid 128" in compile_ptx(adds_a_product, (FLOATS, FLOATS), launch_bounds=(128, 4))


def test_ptx_that_does_not_assemble():
    with pytest.raises(nvjitlink.nvJitLinkError):
        analyse(compile_ptx(adds_a_product, (FLOATS, FLOATS)).replace("fma.rn", "fma.up"))
