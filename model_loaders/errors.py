"""The one exception that loading a model can raise."""

from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(ValueError):
    """A target or draft checkpoint that can't be loaded as asked.

    The message names the file or key, the value found, the value expected, and what to do.
    """


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns any exception but CheckpointError into a CheckpointError `what: its type: its text`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
