"""Drafts drawn from a draft model's logits under the policies of their requests.

A draft's row is filtered as select_support filters a target's, and its draft is the first entry whose cumulative weight
exceeds floor(u * total), as a bonus token is: the first one of integer weights, so that neither batch nor launch plays
a part. What verification needs of the law is a few numbers a row (see gpu/draft_law.py): it asks the logits themselves
for the probabilities of the tokens that it looks at.
"""

from gpu.arrays import Array, on_device
from gpu.proposal import host
from gpu.proposal.record import Drawn
from gpu.support import FILTER_ORDERS

ENTRIES = 1024
"""Kept entries a row that are written down for the draw; of more the row is walked again."""


def draw_drafts(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    uniforms: Array,
    index: Array,
    first: int = 0,
    *,
    filter_order: str = "top_k_first",
    whole_rows: bool = False,
    out: Drawn | None = None,
) -> Drawn:
    """Draw drafts first..first+w-1 of B requests, each from its row of logits [B, w, n].

    logits: float32, float16 or bfloat16 (its bits as uint16). temperature, top_k, top_p, min_p [B*w], filter_order,
    whole_rows: as select_support's, request after request. A greedy row's draft is chosen: the lowest entry with the
    largest logit. uniforms: float64 [B, D] in [0, 1), draft k's coin in column k. index: int64 [B, D], where the
    entries are written; the other columns are left alone. out: a Drawn of an earlier call with the same w, n, B and D,
    whose memory is used again: numbers of drafts that this call doesn't draw stay.

    A row with NaN, +inf or no finite logit, or on a device with a parameter out of range, has no law: entry 0, with a
    share of NaN, which verify_chain refuses; a greedy row's entry 0 is chosen all the same. ValueError for wrong
    shapes, dtypes or ranges; the values of CuPy arrays aren't read.
    """
    if filter_order not in FILTER_ORDERS:
        raise ValueError(f"filter_order={filter_order!r}, expected one of {FILTER_ORDERS}")
    if getattr(logits, "ndim", 0) != 3:
        raise ValueError(f"logits={getattr(logits, 'shape', type(logits).__name__)}, expected [B, w, n]")
    num_drafts = getattr(index, "shape", (0, 0))[-1]
    if not 0 <= first <= num_drafts - logits.shape[1]:
        raise ValueError(f"first={first}, expected {logits.shape[1]} drafts from there among {num_drafts}")
    arguments = (
        logits, temperature, top_k, top_p, min_p, filter_order == "joint", min(ENTRIES, logits.shape[-1]), uniforms,
        index, first,
    )  # fmt: skip
    if on_device(logits):
        from gpu.proposal import device

        return device.draw(*arguments, whole_rows, out)
    return host.draw(*arguments, out)
