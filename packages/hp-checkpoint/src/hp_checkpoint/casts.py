"""Tensors that are saved or loaded in another dtype than their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_checkpoint.conversions import converted, converts
from hp_checkpoint.files import Kind
from hp_checkpoint.tensors import kind_of
from hp_checkpoint.transfers import Target

__all__ = ["CastTarget", "casts"]


def casts(own: Kind, saved: Kind) -> bool:
    """Tell whether a saved tensor is converted into one of another dtype."""
    return own.shape == saved.shape and own.dtype != saved.dtype and converts(saved.dtype, own.dtype)


class CastTarget(Target):
    """A tensor that is loaded from elements of another dtype.

    Args:
        name: of the tensor.
        value: the tensor.
        remaining: bytes that arrive.
        saved: the dtype that they have.
    """

    def __init__(self, name: str, value: Any, remaining: int, saved: str) -> None:
        super().__init__(value, remaining)
        self._saved, self._own, self._length = saved, kind_of(name, value).dtype, remaining

    def memory(self) -> np.ndarray:
        """Return memory for the saved elements."""
        if self.data is None:
            self.data, self.store = np.empty(self._length, np.uint8), self._convert
        return self.data

    def _convert(self) -> None:
        assert self.data is not None
        saved, self.data = self.data, None
        own = super().memory()
        own[...] = converted(saved, self._saved, self._own)
        if self.store is not None:
            self.store()
