"""The one exception that loading a model can raise."""


class CheckpointError(ValueError):
    """A target or draft checkpoint that can't be loaded as asked.

    The message names the file or key, the value found, the value expected, and what to do.
    """
