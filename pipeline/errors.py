"""The one exception that a request can raise, and what its messages show."""


class InvalidRequest(ValueError):
    """A request, or an option, that can't be served as asked.

    The message has the form ``name=value, expected ...`` and says what to do.
    """


def shown_name(name: str) -> str:
    """A name from a user as a message shows it: on one line, whatever it is."""
    return name if name.isidentifier() else short(name)


def short(value: object, most: int = 80) -> str:
    """What a message shows of a value that may be long: its repr, cut at `most` characters."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
