"""How many slots are in use: fewer after a fault, so that what is too much, or who is at fault, is found."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

ROUNDS_A_SLOT = 64
"""Rounds without a fault after which one more slot is used again."""
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


@dataclass
class SlotLimit:
    """The slots that admit may fill.

    Attributes:
        most: The pipeline's `max_batch`.
        limit: Those in use now.
    """

    most: int
    limit: int = field(init=False)
    _good: int = 0

    def __post_init__(self) -> None:
        self.limit = self.most

    def shrink(self, used: int) -> bool:
        """After a fault of a round with `used` requests: half as many slots. False if there was only one."""
        self._good = 0
        if used <= 1:
            return False
        self.limit = used // 2
        return True

    def succeed(self) -> None:
        """After a round without a fault."""
        self._good += 1
        if self._good >= ROUNDS_A_SLOT and self.limit < self.most:
            self._good, self.limit = 0, self.limit + 1

    def reset(self) -> None:
        """Use all slots again."""
        self.limit, self._good = self.most, 0


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this, or what it came of, is the device's or the host's memory running out.

    torch, CuPy, NumPy and CUDA's libraries say it in their own ways; what fails inside a capture may be followed by an
    error of the capture's end.
    """
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False
