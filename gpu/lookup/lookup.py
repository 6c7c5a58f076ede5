"""Drafts looked up in the tokens that a request already has.

For a request of n tokens t, the match at j < n - 1 is the largest m <= max_ngram with t[j - i] = t[n - 1 - i] for
0 <= i < m: the last m tokens occurred before, ending at j. The drafts are what followed the longest match, the latest
of several: t[j + 1], t[j + 2], ..., and past the last token the drafts themselves, so that a period goes on. A longest
match below min_ngram gives none. (Prompt lookup decoding, Saxena 2023; the choice of match and the continued period
are this function's.)
"""

from gpu.arrays import Array, on_device
from gpu.lookup import host


def prompt_lookup(
    token_ids: Array,
    lengths: Array,
    num_drafts: int,
    *,
    max_ngram: int,
    min_ngram: int = 1,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Drafts int32 [B, num_drafts] and how many of them there are, int32 [B]: num_drafts or 0 (then they are 0).

    token_ids int32 [B, L]; lengths int32 [B] in 0..L: the tokens of request b are token_ids[b, :lengths[b]].
    1 <= min_ngram <= max_ngram. All NumPy arrays or all CuPy arrays, for the same drafts; lengths on a device aren't
    read before the launch and are cut to 0..L. out: where both are written. ValueError for wrong shapes, dtypes or
    ranges.
    """
    if num_drafts < 0:
        raise ValueError(f"num_drafts={num_drafts}, expected at least 0")
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram}, expected 1 <= min_ngram <= max_ngram")
    if on_device(token_ids):
        from gpu.lookup import device

        return device.lookup(token_ids, lengths, num_drafts, max_ngram, min_ngram, out)
    return host.lookup(token_ids, lengths, num_drafts, max_ngram, min_ngram, out)
