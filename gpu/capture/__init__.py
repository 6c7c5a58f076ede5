"""Capture: the support of every committed token, as it was used to verify."""

from gpu.capture.masks import capture_masks
from gpu.capture.packing import pack_masks
from gpu.capture.record import Capture
from gpu.capture.round_buffer import RoundBuffer

__all__ = ["Capture", "RoundBuffer", "capture_masks", "pack_masks"]
