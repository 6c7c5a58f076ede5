"""The laws of drafts as the host's kernels take them, whatever they came as; and written out."""

import numpy as np
from numba import njit, prange

from gpu.checks import check_array
from gpu.draft_law import NO_LAWS, DraftLaws, dense_laws, draft_probability
from gpu.logit_rows import element_rows, logit_rows
from gpu.proposal.record import LogitsLaw


def laws_of(draft_probs: np.ndarray | LogitsLaw | None, batch: int, num_drafts: int, vocabulary: int) -> DraftLaws:
    """The laws [batch, num_drafts, vocabulary]; ValueError if they aren't NumPy's, or of another shape."""
    expected = (batch, num_drafts, vocabulary)
    shape = getattr(draft_probs, "shape", type(draft_probs).__name__)
    if draft_probs is not None and shape != expected:
        raise ValueError(f"draft_probs={shape}, expected shape {expected}")
    if draft_probs is None or num_drafts == 0:
        return NO_LAWS
    if not isinstance(draft_probs, LogitsLaw):
        dense = logit_rows(draft_probs, 3)
        return dense_laws(dense.flat, dense.starts, vocabulary)
    rows = element_rows("draft_probs.logits", draft_probs.logits, 3)
    flat = {
        name: check_array(f"draft_probs.{name}", values, dtype, shape).reshape(-1)
        for name, (values, dtype, shape) in draft_probs.parts().items()
    }
    return DraftLaws(
        rows.flat, rows.starts, rows.vocabulary, flat["drawn"], flat["maximum"], flat["cutoff"], flat["scale"],
        flat["share"], flat.get("token_ids", flat.get("entry_of", NO_LAWS.places)), draft_probs.how,
    )  # fmt: skip


def dense_law(law: LogitsLaw) -> np.ndarray:
    """The laws of NumPy arrays as float32 [B, D, V]: the very numbers that verification reads."""
    laws = laws_of(law, *law.shape)
    out = np.empty((laws.starts.size, law.vocabulary), np.float32)
    _write(laws, out)
    return out.reshape(law.shape)


@njit(nogil=True, parallel=True, cache=True)
def _write(laws, out):
    for index in prange(out.shape[0]):
        row = np.int64(index)  # prange counts in uint64
        for token in range(out.shape[1]):
            out[row, token] = draft_probability(laws, row, token)
