"""Arrays to a device and back, for tests of functions that take them one by one."""


def up(array):
    """A NumPy array's copy on the device."""
    import cupy

    return cupy.asarray(array)


def down(array):
    """A device array's copy as NumPy's."""
    return array.get()
