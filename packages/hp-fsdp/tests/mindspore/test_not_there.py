"""Names that MindSpore does not have yet say so."""

from __future__ import annotations

import pytest
from mindspore import nn

import hp_fsdp
from hp_fsdp import StateDictOptions, get_model_state_dict, set_model_state_dict

pytestmark = pytest.mark.framework("mindspore")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get_optimizer_state_dict", ([],)),
        ("set_optimizer_state_dict", ([], {})),
        ("explain", ()),
        ("watch_activations", ()),
    ],
)
def test_not_supported(name, arguments):
    with pytest.raises(NotImplementedError, match=f"{name} is not supported on MindSpore yet"):
        getattr(hp_fsdp, name)(nn.Dense(2, 2), *arguments)


def test_states_are_whole_tensors():
    cell = nn.Dense(2, 3)
    with pytest.raises(NotImplementedError, match="only whole tensors"):
        get_model_state_dict(cell)
    with pytest.raises(NotImplementedError, match="only whole tensors"):
        set_model_state_dict(cell, {})
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(cell, options=options)
    assert list(state) == ["weight", "bias"]
    set_model_state_dict(cell, state, options=options)
