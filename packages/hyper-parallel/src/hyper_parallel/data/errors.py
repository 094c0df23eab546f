"""The error of data that can't be trained on."""

from __future__ import annotations


class DataError(ValueError):
    """Data that can't be trained on.

    Attributes:
        message: what is wrong with it.
        fix: what to do.
        key: of a plan's `[data]` that is wrong, "paths" for what the files hold.
    """

    def __init__(self, message: str, fix: str, *, key: str = "paths") -> None:
        self.message, self.fix, self.key = message, fix, key
        super().__init__(f"{message}; {fix}")
