"""count_committed on a device: one launch, a thread a slot, so equal tokens of a slot are counted one after another."""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, void

from gpu.adjust.words import ONE_MORE
from gpu.arrays import Array
from gpu.device.launch import Kernel, pointer, pointer_to
from gpu.device.memory import check_device
from gpu.verification import Verdict

THREADS = 64


@lru_cache
def count_kernel(threads: int = THREADS) -> Kernel:
    """The kernel; its grid is (ceil(slots / threads),)."""

    def count(words, vocabulary, tokens, width, num_committed, phases, phase, num_slots):
        b = np.int32(cuda.blockIdx.x * threads + cuda.threadIdx.x)
        if b < num_slots and phases[b] == phase:
            for i in range(min(np.int32(num_committed[b]), width)):
                token = np.int32(tokens[np.int64(b) * width + i])
                if 0 <= token < vocabulary:
                    at = np.int64(np.int64(b) * vocabulary + token)
                    words[at] = np.int32(words[at] + np.int32(ONE_MORE))

    ints = pointer_to(int32)
    return Kernel(count, void(ints, int32, ints, int32, ints, ints, int32, int32), threads)


def count_committed(words: Array, verdict: Verdict, phases: Array, phase: int) -> None:
    """count_committed of CuPy arrays."""
    batch, width = verdict.tokens.shape
    vocabulary = np.shape(words)[-1]
    check_device("words", words, np.int32, (batch, vocabulary))
    check_device("verdict.tokens", verdict.tokens, np.int32, (batch, width))
    check_device("verdict.num_committed", verdict.num_committed, np.int32, (batch,))
    check_device("phases", phases, np.int32, (batch,))
    if batch:
        kernel = count_kernel()
        kernel.launch(
            (-(-batch // kernel.threads),),
            pointer(words), vocabulary, pointer(verdict.tokens), width, pointer(verdict.num_committed),
            pointer(phases), phase, batch,
        )  # fmt: skip
