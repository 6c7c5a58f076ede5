"""The requests of a round move on, on the device: the next round starts without a word from the host.

For each slot in the phase that the round was for, with c = num_committed and W rows a block:

    anchor = tokens[c - 1], where c > 0;  start += c;  generated += c;  remaining -= c
    phase = DECODING if the verdict is OK and remaining > 0, else IDLE
    num_drafts = min(max_drafts, remaining - 1) where it decodes, else 0

A slot that is committed more than remains ends; its owner cuts the tokens.
"""

import numpy as np

from gpu.arrays import on_device
from gpu.checks import check_like
from gpu.progress import host
from gpu.progress.record import DECODING, FIRST, Progress
from gpu.verification import Verdict

DTYPES: dict[str, type] = {
    "phase": np.int32, "anchor": np.int64, "start": np.int64, "generated": np.int64, "remaining": np.int64,
    "num_drafts": np.int32,
}  # fmt: skip


def advance(progress: Progress, verdict: Verdict, phase: int, max_drafts: int) -> None:
    """Move the slots of this phase on by what the verdict committed, in place.

    progress: arrays [B] of the record's dtypes, contiguous; verdict: of the same B slots. phase: FIRST (a round of the
    first tokens) or DECODING. max_drafts: at least 0. All NumPy's, or all CuPy's. ValueError for anything else.
    """
    if phase not in (FIRST, DECODING):
        raise ValueError(f"phase={phase}, expected FIRST ({FIRST}) or DECODING ({DECODING})")
    if max_drafts < 0:
        raise ValueError(f"max_drafts={max_drafts}, expected at least 0")
    batch, width = verdict.tokens.shape
    fields = progress.fields()
    device = on_device(verdict.tokens)
    for name, array in fields.items():
        check_like(name, array, DTYPES[name], (batch,), device)
    for name, array, dtype, shape in (
        ("verdict.num_committed", verdict.num_committed, np.int32, (batch,)),
        ("verdict.status", verdict.status, np.uint8, (batch,)),
        ("verdict.tokens", verdict.tokens, np.int32, (batch, width)),
    ):
        check_like(name, array, dtype, shape, device)
    arguments = (*fields.values(), verdict.num_committed, verdict.status, verdict.tokens)
    if batch and device:
        from gpu.progress import device as kernels

        kernels.advance(arguments, batch, width, phase, max_drafts)
    elif batch:
        host.advance(arguments, phase, max_drafts)
