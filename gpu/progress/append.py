"""The tokens that every slot has, kept on the device behind what a round committed.

For each slot in the phase that the round was for, with c = num_committed: tokens[0..c-1] go to the places behind
`start`, which is the newest token's: token_ids[b, start + 1 + i] = tokens[b, i]. Called before `advance` moves `start`.
"""

import numpy as np

from gpu.arrays import Array, on_device
from gpu.checks import check_like
from gpu.progress import append_host
from gpu.progress.record import DECODING, FIRST, Progress
from gpu.verification import Verdict


def append_tokens(token_ids: Array, progress: Progress, verdict: Verdict, phase: int) -> None:
    """Write what the verdict committed behind the tokens of the slots of this phase, in place.

    token_ids int32 [B, L], contiguous; what would lie past L is dropped. progress, of which `phase` and `start` are
    read, verdict and phase: as `advance` takes them, and raises ValueError.
    """
    if phase not in (FIRST, DECODING):
        raise ValueError(f"phase={phase}, expected FIRST ({FIRST}) or DECODING ({DECODING})")
    batch, width = verdict.tokens.shape
    device = on_device(verdict.tokens)
    longest = token_ids.shape[-1] if getattr(token_ids, "ndim", 0) == 2 else 0
    for name, array, dtype, shape in (
        ("token_ids", token_ids, np.int32, (batch, longest)),
        ("phase", progress.phase, np.int32, (batch,)),
        ("start", progress.start, np.int64, (batch,)),
        ("verdict.num_committed", verdict.num_committed, np.int32, (batch,)),
        ("verdict.tokens", verdict.tokens, np.int32, (batch, width)),
    ):
        check_like(name, array, dtype, shape, device)
    arguments = token_ids, progress.phase, progress.start, verdict.num_committed, verdict.tokens
    if batch and device:
        from gpu.progress import append_device

        append_device.append(arguments, batch, width, longest, phase)
    elif batch:
        append_host.append(*arguments, phase)
