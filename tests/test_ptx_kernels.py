"""What the compilers make of every kernel: wide loads, no float64 in hot loops, nothing fused, little spilled.

Each kernel is compiled once a session, for compute capability 9.0. Where the figures are bounds, they are those of
the kernels as they are, and less is better.
"""

import re
import struct
from functools import cache

import pytest

from gpu.capture.kernel import capture_kernel
from gpu.capture.relay import relay_kernel
from gpu.capture.spread import spread_kernel
from gpu.layers.gate import swiglu_kernel
from gpu.layers.turn import turn_kernel
from gpu.proposal.kernel import draw_kernel
from gpu.rounds.kernel import round_kernel
from gpu.support.narrow import narrow_kernel
from gpu.support.pick import pick_kernel
from gpu.support.pick_whole import pick_whole_kernel
from gpu.support.scan import scan_kernel
from gpu.support.settle import settle_kernel
from gpu.support.weigh import weigh_kernel
from gpu.verification.chain import verify_kernel
from gpu.verification.law import by_logits
from tests.ptx import analyse, compile_ptx
from tests.strategies import DTYPES

REGISTERS = 65536  # of a multiprocessor
LAST_TERM = f"0f{struct.unpack('<I', struct.pack('<f', 0.00015353362))[0]:08X}"  # one in each `weight`
FIRST_TERM = f"0d{struct.unpack('<Q', struct.pack('<d', 1 / 23))[0]:016X}"  # one in each `log64`
TICKET = "atom.acq_rel.gpu.global.add.u64"  # one a block
WEIGHT_FMAS, LOG_FMAS = 8, 12  # in gpu/weights.py: of `weight`, of `log64`

KERNELS = {
    **{f"scan {name}": (scan_kernel, name) for name in DTYPES},
    **{f"scan_and_estimate {name}": (scan_kernel, name, True) for name in DTYPES},
    **{f"pick {name}": (pick_kernel, name) for name in DTYPES},
    **{f"verify {name}": (verify_kernel, name, None, False) for name in DTYPES},
    "verify_with_laws float32 one by one": (verify_kernel, "float32", "float16", False),
    **{
        f"verify_with_laws {name} of {other}": (verify_kernel, name, other, True)
        for name, other in zip(DTYPES, DTYPES[1:] + DTYPES[:1], strict=True)
    },
    **{f"capture {name}": (capture_kernel, name) for name in DTYPES},
    "relay": (relay_kernel,),
    **{f"gate {name}": (swiglu_kernel, name) for name in DTYPES},
    **{f"turn {name}": (turn_kernel, name) for name in DTYPES},
    **{f"round {name}": (round_kernel, name, None, False) for name in DTYPES},
    "round_with_laws float32": (round_kernel, "float32", "float32", True),
    **{f"weigh {name}": (weigh_kernel, name) for name in DTYPES},
    **{f"narrow {name}": (narrow_kernel, name) for name in DTYPES},
    **{f"settle {name}": (settle_kernel, name) for name in DTYPES},
    "scan_and_pick bfloat16": (pick_kernel, "bfloat16", True),
    "scan_and_settle float32": (settle_kernel, "float32", True),
    "scan_and_round bfloat16": (round_kernel, "bfloat16", None, False, False, True),
    **{f"pick_whole {name}": (pick_whole_kernel, name) for name in DTYPES},
    "round_whole float32": (round_kernel, "float32", None, False, True),
    **{f"spread {name}": (spread_kernel, name) for name in DTYPES},
    "verify_by_logits bfloat16": (verify_kernel, "bfloat16", by_logits("float32"), True),
    "verify_by_logits float32": (verify_kernel, "float32", by_logits("bfloat16"), True),
    "round_by_logits bfloat16": (round_kernel, "bfloat16", by_logits("float16"), True),
    **{f"draw {name}": (draw_kernel, name) for name in DTYPES},
    "draw_whole float32": (draw_kernel, "float32", True),
}
SPILLED = {
    "pick": 400,
    "round": 400,
    "verify": 96,
    "verify_with_laws": 96,
    "round_with_laws": 460,
    "weigh": 600,
    "narrow": 310,
    "pick_whole": 416,
    "round_whole": 400,
    "draw_whole": 56,
    "settle": 740,
    "spread": 150,
    "scan_and_pick": 160,
    "scan_and_settle": 890,
    "scan_and_round": 204,
    # Where a rejected draft's law is taken from its policy, which reads two rows.
    "verify_by_logits": 400,
    "round_by_logits": 660,
}  # bytes of stores and loads at the registers that the kernel allows itself


@cache
def compiled(case):
    """The kernel, its PTX and the facts about it at the registers that it asks for."""
    factory, *arguments = KERNELS[case]
    kernel = factory(*arguments)
    ptx = compile_ptx(kernel.function, tuple(kernel.signature.args))
    return kernel, ptx, analyse(ptx, max_registers=kernel.max_registers)


def cases(*kinds):
    return pytest.mark.parametrize("case", [case for case in KERNELS if case.split()[0] in kinds])


LATER = (
    "pick", "verify", "verify_with_laws", "capture", "round", "round_with_laws", "settle", "weigh", "narrow",
    "pick_whole", "round_whole", "spread", "verify_by_logits", "round_by_logits", "draw", "draw_whole", "scan_and_pick",
    "scan_and_settle", "scan_and_round",
)  # fmt: skip
LAYERS = "gate", "turn"
SCANS = "scan", "scan_and_estimate"
ALL = *SCANS, "relay", *LAYERS, *LATER


@cases(*ALL)
def test_a_block_fits_a_multiprocessor(case):
    kernel, _, facts = compiled(case)
    assert facts.shared_bytes <= 48 * 1024
    allocated = -(-facts.registers // 8) * 8 * kernel.threads
    assert 2 * allocated <= REGISTERS  # so that one block's latency is another's work


@cases(*ALL)
def test_no_array_is_in_local_memory_and_little_is_spilled(case):
    _, _, facts = compiled(case)
    assert facts.num_local == 0  # an array that the compiler can't keep in registers
    limit = SPILLED.get(case.split()[0], 0)
    assert facts.spill_bytes <= limit
    assert facts.stack_bytes <= limit


@cases(*SCANS)
def test_the_scan_reads_wide_and_reduces_in_few_instructions(case):
    _, ptx, facts = compiled(case)
    estimates = case.startswith("scan_and_estimate")
    assert facts.num_16_byte_loads == 4
    assert len(re.findall(r"\bld\.global\.L1::no_allocate\.v4", ptx)) == 4
    others = re.findall(r"\bld\.global\.(?!L1)\w+", ptx)  # nothing else of the logits
    assert len(others) == (4 if estimates else 0)  # what bounds the row
    per_thread = 16 if case.endswith("float32") else 32  # elements
    assert facts.num_f64 == 0
    assert facts.num_fma == (per_thread + 1 if estimates else 0)
    assert len(re.findall(r"\bex2\.approx\.ftz\.f32", ptx)) == (per_thread + 2 if estimates else 0)
    assert facts.registers <= 32  # four blocks of 512 threads a multiprocessor
    assert set(facts.atomics) == {"atom.shared.add.u32", "atom.global.add.u32"}
    packed = {"float32": r"max\.NaN\.f32", "float16": r"max\.NaN\.f16x2", "bfloat16": r"max\.NaN\.bf16x2"}
    assert re.search(packed[case.split()[1]], ptx)
    assert "redux.sync.max.u32" in ptx


@cases(*LATER)
def test_rows_are_read_again_wide(case):
    wide = {"pick": 9, "verify": 8, "verify_with_laws": 5, "capture": 1, "round": 24, "round_with_laws": 24}
    wide |= {"weigh": 4, "narrow": 4, "spread": 4}
    wide |= {"pick_whole": 9, "round_whole": 24, "verify_by_logits": 2, "round_by_logits": 24}
    wide |= {
        "draw": 24,
        "draw_whole": 24,
        "settle": 9,
        "scan_and_pick": 13,
        "scan_and_settle": 13,
        "scan_and_round": 28,
    }
    assert compiled(case)[2].num_16_byte_loads >= wide[case.split()[0]]


@cases(*LATER)
def test_float64_is_rare(case):
    """It is for scales, thresholds and logarithms: a row each, not an element."""
    _, ptx, facts = compiled(case)
    limits = {"pick": 60, "verify": 100, "capture": 80, "round": 190, "weigh": 60, "narrow": 10}
    limits |= {"pick_whole": 80, "round_whole": 310, "spread": 70, "verify_by_logits": 290, "round_by_logits": 340}
    limits |= {"verify_with_laws": 420, "round_with_laws": 430}  # a residual a lane
    limits |= {"draw": 210, "draw_whole": 230, "settle": 150}
    limits |= {f"scan_and_{kind}": limits[kind] for kind in ("pick", "settle", "round")}
    assert facts.num_f64 <= limits[case.split()[0]]
    if case.startswith(("pick", "settle", "weigh", "narrow")):
        least = {"weigh": 4}.get(case.split()[0], 1)  # weights in the loop; its search for a window has one a bin
        weighing = [loop for loop in innermost_loops(ptx) if loop.count(LAST_TERM) >= least]
        assert len(weighing) > (5 if case.startswith(("pick", "settle")) else 0)
        in_f64 = sum(map(bool, map(computes_in_f64, weighing)))
        assert in_f64 <= (2 if case.startswith("settle") else 0)  # one over a row's chunks, by four and one by one


@cases(*LAYERS)
def test_layers_compute_in_float32(case):
    assert compiled(case)[2].num_f64 == 0


@cases("verify", "round", "round_whole", "verify_with_laws", "round_with_laws", "verify_by_logits", "round_by_logits")
def test_rows_wait_for_each_other_only_in_a_block(case):
    """One place where a ratio is made known, and two that ask: a row for its scale, and who draws what was left."""
    known = len(re.findall(r"\bst\.relaxed\.gpu\.global\.f64", compiled(case)[1]))
    asked = len(re.findall(r"\bld\.relaxed\.gpu\.global\.f64", compiled(case)[1]))
    as_block = case.startswith(("verify_", "round_with", "round_by")) and "one by one" not in case
    assert (known, asked) == ((1, 4) if as_block else (0, 0))  # each asks once, then again and again


@cases(*SCANS, "pick", "settle", "verify", "verify_with_laws", "verify_by_logits", "capture", "draw")
def test_atomics_are_32_bits_wide(case):
    for name in compiled(case)[2].atomics.keys() - {TICKET}:
        assert name.endswith(("u32", "s32", "b32")), name


@cases(*LATER)
def test_no_product_is_fused_into_a_sum(case):
    """Every fma is asked for by weights or an estimate, and no loose product reaches a sum it could be fused into."""
    _, ptx, facts = compiled(case)
    num_weights, num_logs = ptx.count(LAST_TERM), ptx.count(FIRST_TERM)
    of_estimate = 16 + 1 if case == "scan_and_settle float32" else 0
    assert facts.num_fma == WEIGHT_FMAS * num_weights + LOG_FMAS * num_logs + of_estimate
    loose = set(re.findall(r"\bmul(?:\.ftz)?\.f(?:32|64)\s+(%\w+),", ptx))
    sums = re.findall(r"\b(?:add|sub)(?:\.\w+)*\.f(?:32|64)\s+%\w+,\s*([^;]*);", ptx)
    assert not [terms for terms in sums if loose & set(re.findall(r"%\w+", terms))]


def innermost_loops(ptx):
    """The text from each label to a backward branch to it that holds no other loop."""
    lines = ptx.splitlines()
    at = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))}
    spans = []
    for i, line in enumerate(lines):
        found = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if found and at.get(found[1], i + 1) <= i:
            spans.append((at[found[1]], i))
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return ["\n".join(lines[first : last + 1]) for first, last in inner]


def computes_in_f64(text):
    return re.search(r"\b(?:add|sub|mul|div|fma|cvt)\S*\.f64", text)


def test_innermost_loops_of_a_text():
    text = "$A:\n add.f64 %d;\n$B:\n add.s32 %r;\n bra $B;\n @%p bra $A;\n bra $C;\n$C:\n ret;"
    assert innermost_loops(text) == ["$B:\n add.s32 %r;\n bra $B;"]
    assert computes_in_f64(text)
    assert not computes_in_f64(innermost_loops(text)[0])
