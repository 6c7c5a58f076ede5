"""The oracle of a regular expression's next tokens: Python's `re` and every short string. Slow and obvious."""

from __future__ import annotations

import itertools
import re
from functools import cache


class Language:
    """The outputs that match a regular expression, over tokens that each add a text.

    A prefix can be continued if some string of at most `reach` further tokens completes it: enough for expressions that
    need no more than that.
    """

    def __init__(self, pattern: str, texts: dict[int, str], reach: int):
        self.pattern, self.texts, self.reach = re.compile(pattern), texts, reach
        self.viable = cache(self._viable)

    def text(self, tokens: tuple[int, ...]) -> str:
        return "".join(self.texts[token] for token in tokens)

    def holds(self, tokens: tuple[int, ...]) -> bool:
        """Whether the grammar may end behind these tokens."""
        return self.pattern.fullmatch(self.text(tokens)) is not None

    def _viable(self, tokens: tuple[int, ...]) -> bool:
        return any(
            self.holds(tokens + more)
            for length in range(self.reach + 1)
            for more in itertools.product(self.texts, repeat=length)
        )

    def allowed(self, tokens: tuple[int, ...]) -> set[int]:
        """The tokens that may come behind these."""
        return {token for token in self.texts if self.viable((*tokens, token))}
