"""Where the requests of a batch stand."""

from dataclasses import dataclass

from gpu.arrays import Array

IDLE, FIRST, DECODING = 0, 1, 2  # a slot's phase: nobody's or ended; awaiting the first token; decoding


@dataclass(frozen=True)
class Progress:
    """One entry a slot, kept by the caller and changed in place by `advance`."""

    phase: Array  # int32 [B]: IDLE, FIRST or DECODING
    anchor: Array  # int64 [B]: the newest committed token
    start: Array  # int64 [B]: the anchor's position; before the first token, that of the prompt's last
    generated: Array  # int64 [B]: tokens committed so far
    remaining: Array  # int64 [B]: tokens that may still be committed
    num_drafts: Array  # int32 [B]: drafts that the next round may verify

    def fields(self) -> dict[str, Array]:
        """The arrays by name, in the order in which kernels take them."""
        return {
            "phase": self.phase, "anchor": self.anchor, "start": self.start, "generated": self.generated,
            "remaining": self.remaining, "num_drafts": self.num_drafts,
        }  # fmt: skip
