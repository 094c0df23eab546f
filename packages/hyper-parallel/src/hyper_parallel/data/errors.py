"""The error of data that can't be trained on."""

from __future__ import annotations


class DataError(ValueError):
    """Data that can't be trained on.

    Attributes:
        message: what is wrong with it.
        fix: what to do.
    """

    def __init__(self, message: str, fix: str) -> None:
        self.message, self.fix = message, fix
        super().__init__(f"{message}; {fix}")
