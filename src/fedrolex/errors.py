"""The one exception a user's mistake raises: its text is the whole message."""


class FedrolexError(ValueError):
    """Something the user gave cannot be used.

    The message is one line: what was given, what is allowed, what to do. The command line prints it and
    exits with status 2; it never shows a traceback for one of these.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
