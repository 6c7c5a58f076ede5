"""Replay: the log-softmax of a trainer's logits over recorded supports, and its gradient.

Row i has logits z [V], a temperature T and a support S, its token ids; with s = z / T:

    entry(v) = s_v - log(sum over u in S of exp(s_u))              v in S
    d/dz_v   = (g_v - exp(entry(v)) * sum over u in S of g_u) / T  v in S, else 0

("Keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1; g is the gradient by the entries.) Everything is
computed in float64, from (z - max z) / T, so that logits far from zero lose no digits, and summed in an order of its
own: a result depends on its row alone, and is the same on the host and on a device. Only what is asked for is read, so
the cost is that of the supports, not of the vocabulary.

A row with a temperature below 1e-5 is greedy: its support is one token, its entry 0, its gradient 0. Logits that are
NaN or +inf, or a support whose logits are all -inf, give NaN, as log_softmax would.

On a device all arrays are CuPy's and one launch is queued on CuPy's current stream. The values of ids, offsets and
temperatures aren't checked there: an id outside the vocabulary counts as a NaN and gets no gradient, offsets are
cut to the entries, and a greedy row's entries are 0 however many it has.
"""

from gpu.arrays import Array, on_device
from gpu.replay import host


def support_log_softmax(
    logits: Array, token_ids: Array, offsets: Array, temperature: Array, *, out: Array | None = None
) -> Array:
    """The log-probability of every entry of every support, float64 [nnz].

    Args:
        logits: [N, V], float32, float64, float16, bfloat16 (ml_dtypes' or its bits as uint16). The tokens of a row
            must be adjacent in memory; rows may be strided. Only read.
        token_ids: int32 [nnz], in [0, V).
        offsets: int64 [N + 1]; row i's support is ``token_ids[offsets[i]:offsets[i + 1]]``.
        temperature: float64 [N], at least 0 and finite.
        out: Where to write; None: a new array.

    Raises:
        ValueError: A wrong type, shape or range; a greedy row with more than one token.
    """
    if on_device(logits):
        from gpu.replay import device

        return device.support_log_softmax(logits, token_ids, offsets, temperature, out)
    return host.support_log_softmax(logits, token_ids, offsets, temperature, out)


def support_log_softmax_backward(
    entries: Array, grad_entries: Array, token_ids: Array, offsets: Array, temperature: Array, grad_logits: Array
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
    if on_device(grad_logits):
        from gpu.replay import device

        device.support_log_softmax_backward(entries, grad_entries, token_ids, offsets, temperature, grad_logits)
    else:
        host.support_log_softmax_backward(entries, grad_entries, token_ids, offsets, temperature, grad_logits)


def row_sums(entries: Array, offsets: Array, *, out: Array | None = None) -> Array:
    """The sum of each row's entries, float64 [N], in the order that the log-softmax sums in.

    Args:
        entries: float64 [nnz].
        offsets: int64 [N + 1].
        out: Where to write; None: a new array.

    Raises:
        ValueError: A wrong type, shape or range.
    """
    if on_device(entries):
        from gpu.replay import device

        return device.row_sums(entries, offsets, out)
    return host.row_sums(entries, offsets, out)
