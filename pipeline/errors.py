"""The one exception that a request can raise."""


class InvalidRequest(ValueError):
    """A request, or an option, that can't be served as asked.

    The message has the form ``name=value, expected ...`` and says what to do.
    """
