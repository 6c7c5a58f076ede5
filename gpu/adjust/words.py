"""What a slot knows of a token, in one int32.

Bit 0: it is in the prompt. Bit 1: it ends the output. From bit 2 on: its occurrences in the output.
"""

from collections.abc import Iterable

import numpy as np

from gpu.checks import check_ids

IN_PROMPT, ENDING, COUNT_SHIFT = 1, 2, 2
ONE_MORE = 1 << COUNT_SHIFT


def history_words(vocabulary: int, prompt: np.ndarray, output: np.ndarray, endings: Iterable[int] = ()) -> np.ndarray:
    """The words of one slot, int32 [V], as a `SlotHistory` has them.

    prompt, output: int32 [n] each; endings: ids of tokens that end the output. ValueError for ids outside 0..V-1.
    """
    ends = np.array(sorted(endings), np.int32)
    prompt, output, ends = (
        check_ids(name, ids, vocabulary) for name, ids in (("prompt", prompt), ("output", output), ("endings", ends))
    )
    words = np.bincount(output, minlength=vocabulary).astype(np.int32) << np.int32(COUNT_SHIFT)
    words[prompt] |= IN_PROMPT
    words[ends] |= ENDING
    return words
