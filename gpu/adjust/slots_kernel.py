"""The kernel of slots' penalties, biases and bans: a thread a slot and token, which goes through the slot's rows.

So a token's word and bias are read once for all rows, and its drafts so far are counted on the way.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32, void

from gpu.adjust.kernel import penalties_of
from gpu.adjust.penalty import adjust_token, is_neutral
from gpu.device.launch import Kernel, pointer_to
from gpu.device.vectors import element_of

THREADS = 256


@lru_cache
def slots_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this format; its grid is (ceil(vocabulary / threads), slots)."""
    element = element_of(name)

    def adjust(
        elements, skew, request_step, row_step, out, out_request_step, out_row_step, width, vocabulary, drafts,
        num_drafts, given, words, biases, generated, min_new_tokens, repetitions, frequencies, presences,
    ):  # fmt: skip
        slot = np.int32(cuda.blockIdx.y)
        token = np.int32(cuda.blockIdx.x * threads + cuda.threadIdx.x)
        if token >= vocabulary:
            return
        repetition, frequency, presence = penalties_of(given, slot, repetitions, frequencies, presences)
        neutral = is_neutral(repetition, frequency, presence)
        num_early = np.int64(np.int64(min_new_tokens[slot]) - np.int64(generated[slot]))
        word = np.int32(words[np.int64(slot) * vocabulary + token])
        bias = np.float32(biases[np.int64(slot) * vocabulary + token])
        source = np.int64(np.int64(slot) * request_step + skew + token)
        target = np.int64(np.int64(slot) * out_request_step + token)
        draft = np.int64(np.int64(slot) * (width - 1))
        last, num_drafted = np.int32(num_drafts[slot]), np.int32(0)
        for i in range(width):
            x = np.float32(element(elements, source))
            if i <= last:
                x = np.float32(
                    adjust_token(
                        x, word, num_drafted, bias, i < num_early, neutral, repetition, frequency, presence
                    )
                )  # fmt: skip
            out[target] = x
            if i + 1 < width and drafts[draft + i] == token:
                num_drafted = np.int32(num_drafted + 1)
            source, target = np.int64(source + row_step), np.int64(target + out_row_step)

    reals, longs = pointer_to(float32), pointer_to(int64)
    signature = void(
        pointer_to(uint32), int32, int64, int64, reals, int64, int64, int32, int32, pointer_to(int32),
        pointer_to(int32), int32, pointer_to(int32), reals, longs, longs, reals, reals, reals,
    )  # fmt: skip
    return Kernel(adjust, signature, threads)
