"""Which arrays the functions take: NumPy's on the host, CuPy's on a device.

Anything with DLPack becomes either without a copy: `cupy.from_dlpack(tensor)`, `numpy.from_dlpack(tensor)`.
"""

from typing import Any

Array = Any  # numpy.ndarray or cupy.ndarray; NumPy and CuPy share no type


def on_device(array: Any) -> bool:
    """Whether this is a CuPy array (or stands for one in the simulator)."""
    return type(array).__module__.split(".")[0] == "cupy" or getattr(array, "simulated_device", False)
