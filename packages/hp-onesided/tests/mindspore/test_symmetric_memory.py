"""There is no symmetric memory of MindSpore's tensors."""

from __future__ import annotations

import pytest

from hp_onesided import SymmetricMemory


def test_tensors_of_mindspore_are_refused():
    with pytest.raises(RuntimeError, match="tensors of mindspore can't view shared memory; use PyTorch"):
        SymmetricMemory(None, 64)
