"""Names that MindSpore does not have yet say so."""

from __future__ import annotations

import pytest
from mindspore import nn

import hp_fsdp

pytestmark = pytest.mark.framework("mindspore")


def test_not_supported():
    with pytest.raises(NotImplementedError, match="watch_activations is not supported on MindSpore yet"):
        hp_fsdp.watch_activations(nn.Dense(2, 2))
