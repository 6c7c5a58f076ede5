"""What the compilers make of a CUDA kernel, on a machine without a GPU.

`compile_ptx` goes through Numba and NVVM as a launch does; `analyse` reads the PTX and hands it to nvJitLink, the
assembler that Numba links with at run time (it comes with `numba-cuda[cu13]`; a `ptxas` of an older toolkit refuses
the PTX version of a newer NVVM).
"""

import collections
import re
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

from cuda.bindings import nvjitlink
from numba import cuda
from numba.cuda import dispatcher

COMPUTE_CAPABILITY = (9, 0)
_ARCHITECTURE = "sm_90a"  # what Numba links for on a device of that capability

_INSTRUCTION = re.compile(r"^(?:@!?%?\w+\s+)?([a-z]\w*(?:\.[\w:]+)+)\s")
_SHARED = re.compile(r"\.shared(?: \.align \d+)? \.[a-z](\d+) [\w$]+((?:\[\d*\])*)")
_SIXTEEN_BYTES = re.compile(r"^ld\.global\.(?:.*\.)?(?:v4\.[busf]32|v2\.[busf]64|b128)$")
_MOVES = {"ld", "st", "mov", "selp", "shfl"}


@dataclass(frozen=True)
class Facts:
    """Of one kernel, with everything inlined into it.

    `num_f64` counts instructions that compute in or convert from or to float64. Where every bit counts: `num_fma` must
    be what the source asks for, because NVVM fuses a product with its only sum, and `num_loose_products` says how many
    multiplications have no rounding modifier, so that the assembler may fuse them yet (it leaves `mul.rn` alone:
    `libdevice.fmul_rn`). `atomics` counts by instruction, like `atom.shared.add.u32`. Bytes of shared memory are the
    static ones of a block; registers, stack and spills are a thread's.
    """

    num_f64: int
    num_fma: int
    num_loose_products: int
    num_local: int  # declarations of and accesses to local memory
    num_16_byte_loads: int  # from global memory
    shared_bytes: int
    atomics: dict[str, int]
    registers: int
    stack_bytes: int
    spill_bytes: int


def compile_ptx(kernel, signature, **options):
    """PTX of a kernel (a function or a `cuda.jit` dispatcher) for a tuple of argument types.

    `options` are those of `numba.cuda.compile`: `fastmath`, `launch_bounds`, `lineinfo`, `opt`, `debug`.
    """
    # Numba asks the driver for the device where a kernel calls a device function.
    device = SimpleNamespace(compute_capability=COMPUTE_CAPABILITY)
    with mock.patch.object(dispatcher, "get_current_device", return_value=device):
        ptx, _ = cuda.compile(
            getattr(kernel, "py_func", kernel),
            signature,
            device=False,
            cc=COMPUTE_CAPABILITY,
            output="ptx",
            abi="numba",
            **options,
        )
    return ptx


def analyse(ptx, max_registers=None):
    """The facts about a kernel's PTX. Raises nvJitLinkError where it doesn't assemble."""
    instructions = _instructions(ptx)
    names = [name.split(".") for name in instructions]
    log = _assemble(ptx, max_registers)
    return Facts(
        num_f64=sum("f64" in parts and parts[0] not in _MOVES for parts in names),
        num_fma=sum(parts[0] == "fma" for parts in names),
        num_loose_products=sum(parts in (["mul", "f32"], ["mul", "ftz", "f32"], ["mul", "f64"]) for parts in names),
        num_local=ptx.count(".local .align") + sum(parts[0] in ("ld", "st") and "local" in parts for parts in names),
        num_16_byte_loads=sum(bool(_SIXTEEN_BYTES.match(name)) for name in instructions),
        shared_bytes=sum(_size(*found) for found in _SHARED.findall(ptx)),
        atomics=dict(collections.Counter(name for name in instructions if name.startswith(("atom.", "red.")))),
        registers=max(_figures(r"Used (\d+) registers", log)),
        stack_bytes=max(_figures(r"(\d+) bytes stack frame", log)),
        spill_bytes=sum(_figures(r"(\d+) bytes spill", log)),
    )


def _instructions(ptx):
    """The names of all instructions, of inline assembly too."""
    statements = re.sub(r"//.*", "", ptx).replace("{", " ").replace("\n", ";").split(";")
    return [found[1] for statement in statements if (found := _INSTRUCTION.match(statement.strip() + " "))]


def _size(bits, dimensions):
    size = int(bits) // 8
    for dimension in re.findall(r"\[(\d*)\]", dimensions):
        size *= int(dimension or 0)  # dynamic shared memory has no size
    return size


def _figures(pattern, log):
    return [int(figure) for figure in re.findall(pattern, log)]


def _assemble(ptx, max_registers):
    """What the assembler says about registers, stack and spills."""
    options = [f"-arch={_ARCHITECTURE}", "-Xptxas=-v"]
    if max_registers is not None:
        options.append(f"-maxrregcount={max_registers}")
    linker = nvjitlink.create(len(options), options)
    try:
        data = ptx.encode() + b"\0"
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, data, len(data), "kernel")
        nvjitlink.complete(linker)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
    finally:
        nvjitlink.destroy(linker)
    return log.decode().rstrip("\0")
