"""The filter: which tokens of every row can be sampled, and their weights.

A row is OK or INVALID (NaN, +inf, or no finite logit). Of an OK row, logit x is kept iff it is finite and

    top_k   count(> x) < top_k                              skipped where top_k is 0 or at least V
    top_p   mass(> x) < top_p * Z                           skipped where top_p >= 1: the row's identity
    min_p   x >= m + T*log(min_p)                           last, on what the others keep

with Z the mass of the top-k set (filter_order="top_k_first": top-k, renormalise, top-p) or of the whole row
("joint"). All are cutoffs on the value: ties survive, and the crossing token of top_p is kept. Rows with
T < 1e-5 or top_k = 1 are greedy: the singleton {argmax, lowest index among equals}.
Semantics: vLLM's and SGLang's filters, ties kept. Weights: see gpu/weights.py.
"""

from gpu.arrays import Array, on_device
from gpu.support import host
from gpu.support.record import Support

FILTER_ORDERS = ("top_k_first", "joint")


def select_support(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array | None = None,
    *,
    filter_order: str = "top_k_first",
    capacity: int,
    whole_rows: bool = False,
    out: Support | None = None,
) -> Support:
    """The kept set of every row.

    logits [R, V]: float32, float16, bfloat16 or uint16 with its bits; V at most 2^18; rows may be strided.
    temperature float32 [R], finite and >= 0 (below 1e-5: greedy). top_k int32 [R], 0 for unbounded. top_p
    float32 [R] in (0, 1]. min_p float32 [R] in [0, 1), or None for 0. capacity: entries stored a row, at
    least 1; a larger support is counted in full and walked again by its readers. whole_rows: a hint where the arrays
    are a device's, which changes no number: rows may be there that have to be weighed whole, those without a top_k
    below V, and with "joint" those with a top_p below 1. With it a small support is as a rule found without weighing
    the row, and else many blocks share it; without it one block has it alone. Rows that a top_k bounds are fastest
    without it. out: a Support of an earlier call of the same shapes and dtype, whose memory is used again (a CUDA graph
    needs that).
    All arrays are NumPy's, or all CuPy's, and the same kernels' numbers come back. ValueError for anything else;
    the values of CuPy arrays aren't read, and a parameter out of range makes its row INVALID.
    """
    if filter_order not in FILTER_ORDERS:
        raise ValueError(f"filter_order={filter_order!r}, expected one of {FILTER_ORDERS}")
    if capacity < 1:
        raise ValueError(f"capacity={capacity}, expected at least 1 entry a row")
    joint = filter_order == "joint"
    if on_device(logits):
        from gpu.support import device

        return device.select(logits, temperature, top_k, top_p, min_p, joint, capacity, whole_rows, out)
    return host.select(logits, temperature, top_k, top_p, min_p, joint, capacity, out)
