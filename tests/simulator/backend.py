"""The device backend in the simulator, at any block size and any start in memory."""

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import numpy as np

from gpu.capture import device as capture_device
from gpu.device import memory
from gpu.device.memory import SimulatedArray
from gpu.proposal import device as proposal_device
from gpu.rounds import device as rounds_device
from gpu.support import device as support_device
from gpu.verification import device as verification_device
from tests.backends import Device

down = np.asarray


def up(array):
    """A NumPy array's copy on the simulated device."""
    return array.copy().view(SimulatedArray)


FACTORIES = (
    (support_device, "scan_kernel"),
    (support_device, "settle_kernel"),
    (support_device, "weigh_kernel"),
    (support_device, "narrow_kernel"),
    (support_device, "pick_kernel"),
    (support_device, "pick_whole_kernel"),
    (verification_device, "verify_kernel"),
    (capture_device, "capture_kernel"),
    (rounds_device, "round_kernel"),
    (rounds_device, "spread_kernel"),
    (proposal_device, "draw_kernel"),
)
READERS = (support_device, verification_device, capture_device, rounds_device, proposal_device)


class Simulated(Device):
    """Kernels of blocks of `threads`; the first logit lies `skew` elements behind a granule's boundary."""

    name = "simulated"

    def __init__(self, threads=64, skew=0, whole_rows=False):
        self.threads, self.skew, self.hints = threads, skew, (whole_rows,)

    def up(self, array):
        return array.view(SimulatedArray)

    def down(self, array):
        return np.array(array)

    def _call(self, function, arguments, options):
        with self.patched():
            return super()._call(function, arguments, options)

    def run_round(self, *arguments, **options):
        with self.patched():
            return super().run_round(*arguments, **options)

    def draw_drafts(self, *arguments, **options):
        with self.patched():
            return super().draw_drafts(*arguments, **options)

    @contextmanager
    def patched(self):
        """Kernels of this block size, logits with this skew."""
        with ExitStack() as stack:
            for module, name in FACTORIES:
                factory = partial(getattr(module, name), threads=self.threads)
                stack.enter_context(mock.patch.object(module, name, factory))
            for module in READERS:
                stack.enter_context(mock.patch.object(module, "device_logits", self._skewed))
            yield

    def _skewed(self, *arguments):
        rows = memory.device_logits(*arguments)
        in_front = np.full(self.skew * (16 // rows.form.lanes), 0xFF, np.uint8)  # NaN, as what lies behind
        words = np.concatenate([in_front, rows.words.view(np.uint8)])
        behind = np.full(-words.size % 32, 0xFF, np.uint8)
        return rows._replace(words=np.concatenate([words, behind]).view(np.uint32), skew=self.skew)
