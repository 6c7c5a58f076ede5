"""Where one request stands in its grammar, and what each row of a block may be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np


class Walk:
    """One request's way through its grammar.

    A row may be what the grammar allows behind the row's own prefix. Where the grammar may end, that is an ending
    token; where the request has none (`ignore_eos`, or a model without one), the output ends at the token behind which
    the grammar allows nothing more.

    Args:
        compiled: From `Compiler`.
        vocab_size: V.
        endings: Ids that end the output where the grammar may end.
    """

    def __init__(self, compiled: Any, vocab_size: int, endings: Collection[int]) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._endings = frozenset(endings)
        self._num_words = -(-vocab_size // 32)
        self._count = 0

    @cached_property
    def _matcher(self) -> Any:
        # Not before the request runs: many may wait.
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled)

    def push(self, token: int) -> bool:
        """Take in a committed token; whether the grammar ends the output with it.

        Raises:
            ValueError: The grammar doesn't allow it: the policy that it was drawn from wasn't the grammar's.
        """
        if token in self._endings:
            return False  # whoever looks for endings says so
        if not self._accepts(token):
            raise ValueError(f"grammar: token={token} was committed, expected one that the grammar allows")
        self._count += 1
        if self._endings:
            return False
        allowed, may_end = self._next()
        return may_end and not allowed.any()

    def go_back(self, tokens: Sequence[int]) -> None:
        """Stand where these committed tokens lead."""
        if self._count:
            self._matcher.reset()
        self._count = 0
        for token in tokens:
            self.push(token)

    def masks(self, drafts: Sequence[int], num_early: int = 0, banned: Collection[int] = ()) -> np.ndarray:
        """What each row of a block may be: bits int32 [n, ceil(V / 32)], rows 0..n-1 of at most ``len(drafts) + 1``.

        Row i is behind the committed tokens and drafts 0..i-1. The verification can't pass a draft that its row doesn't
        allow, and nothing counts behind an ending: rows behind one of these are left out.

        Args:
            drafts: The request's drafts.
            num_early: The first rows, in which `banned` ids may not come, unless the grammar allows nothing else.
            banned: See above.
        """
        rows, accepted = [], 0
        try:
            for i in range(len(drafts) + 1):
                allowed, may_end = self._next()
                if may_end:
                    _set(allowed, self._endings)
                if i < num_early:
                    rest = allowed.copy()
                    clear_bits(rest, banned)
                    allowed = rest if rest.any() else allowed
                rows.append(allowed)
                if i == len(drafts) or drafts[i] in self._endings or not _holds(allowed, drafts[i]):
                    break
                if not self._accepts(drafts[i]):
                    break
                accepted += 1
        finally:
            if accepted:
                self._matcher.rollback(accepted)
        return np.stack(rows)

    def _accepts(self, token: int) -> bool:
        return 0 <= token < self._vocab_size and self._matcher.accept_token(token)

    def _next(self) -> tuple[np.ndarray, bool]:
        """The tokens that continue, as bits int32 [ceil(V / 32)], and whether the grammar may end here."""
        bits = np.empty((1, -(-(self._vocab_size + 1) // 32)), np.int32)
        self._matcher.fill_next_token_bitmask(bits)
        may_end = _holds(bits[0], self._vocab_size)
        clear_bits(bits[0], [self._vocab_size])
        return bits[0, : self._num_words], may_end


def _holds(bits: np.ndarray, token: int) -> bool:
    return bool(int(bits[token // 32]) >> (token % 32) & 1)


def _set(bits: np.ndarray, tokens: Collection[int]) -> None:
    words = bits.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)


def clear_bits(bits: np.ndarray, tokens: Collection[int]) -> None:
    """Forbid these tokens in a mask int32 [ceil(V / 32)], in place."""
    words = bits.view(np.uint32)
    for token in tokens:
        words[token // 32] &= ~np.uint32(1 << token % 32)
