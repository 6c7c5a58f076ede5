"""append_tokens on the host."""

from numba import njit


@njit(nogil=True, cache=True)
def append(token_ids, phase_of, start, num_committed, tokens, phase):
    """append_tokens of NumPy arrays."""
    for b in range(phase_of.size):
        if phase_of[b] != phase:
            continue
        for i in range(min(max(num_committed[b], 0), tokens.shape[1])):
            at = start[b] + 1 + i
            if 0 <= at < token_ids.shape[1]:
                token_ids[b, at] = tokens[b, i]
