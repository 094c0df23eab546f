"""Names that MindSpore does not have yet say so."""

from __future__ import annotations

import mindspore
import pytest
from mindspore import nn

import hp_fsdp

pytestmark = pytest.mark.framework("mindspore")


def test_not_supported():
    with pytest.raises(
        NotImplementedError, match=r"watch_activations is not .* mindspore.runtime.max_memory_allocated\("
    ):
        hp_fsdp.watch_activations(nn.Dense(2, 2))
    assert mindspore.runtime.max_memory_allocated() >= 0
