"""Replay: the log-softmax of a trainer's logits over recorded supports, and its gradient.

Row i has logits z [V], a temperature T and a support S, its token ids; with s = z / T:

    entry(v) = s_v - log(sum over u in S of exp(s_u))              v in S
    d/dz_v   = (g_v - exp(entry(v)) * sum over u in S of g_u) / T  v in S, else 0

("Keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1; g is the gradient by the entries.) Everything is
computed in float64; only what is asked for is read, so the cost is that of the supports, not of the vocabulary.

A row with a temperature below 1e-5 is greedy: its support is one token, its entry 0, its gradient 0. Logits that are
NaN or +inf, or a support whose logits are all -inf, give NaN, as log_softmax would.
"""

import numpy as np

from gpu.replay import host


def support_log_softmax(
    logits: np.ndarray, token_ids: np.ndarray, offsets: np.ndarray, temperature: np.ndarray
) -> np.ndarray:
    """The log-probability of every entry of every support, float64 [nnz].

    Args:
        logits: [N, V], float32, float64, float16, bfloat16 (ml_dtypes' or its bits as uint16). The tokens of a row
            must be adjacent in memory; rows may be strided. Only read.
        token_ids: int32 [nnz], in [0, V).
        offsets: int64 [N + 1]; row i's support is ``token_ids[offsets[i]:offsets[i + 1]]``.
        temperature: float64 [N], at least 0 and finite.

    Raises:
        ValueError: A wrong type, shape or range; a greedy row with more than one token.
    """
    return host.support_log_softmax(logits, token_ids, offsets, temperature)


def support_log_softmax_backward(
    entries: np.ndarray,
    grad_entries: np.ndarray,
    token_ids: np.ndarray,
    offsets: np.ndarray,
    temperature: np.ndarray,
    grad_logits: np.ndarray,
) -> None:
    """Write the gradient by the logits at the supports; nothing else of `grad_logits` is touched.

    Args:
        entries: float64 [nnz], what support_log_softmax returned.
        grad_entries: float64 [nnz], the gradient by the entries.
        token_ids, offsets, temperature: As given to support_log_softmax. An id stands once in a row.
        grad_logits: [N, V], C-contiguous, of a dtype of the logits; zero on entry. Written.

    Raises:
        ValueError: A wrong type, shape or range.
    """
    host.support_log_softmax_backward(entries, grad_entries, token_ids, offsets, temperature, grad_logits)
