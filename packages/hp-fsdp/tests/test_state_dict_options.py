"""Options and flat dictionaries: no framework."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hp_fsdp import StateDictOptions
from hp_fsdp.state_dict.optimizer import flatten_optimizer_state, unflatten_optimizer_state

NESTED = {
    "state": {"a.w": {"step": 3, "exp_avg": 1.5}},
    "param_groups": [{"lr": 0.1, "params": ["a.w", "a.b"]}, {"lr": 0.2, "params": ["c"]}],
}


def test_flat_and_nested_say_the_same():
    flat = flatten_optimizer_state(NESTED)
    assert list(flat) == [
        "state.a.w.step",
        "state.a.w.exp_avg",
        "param_groups.a.w.lr",
        "param_groups.a.b.lr",
        "param_groups.c.lr",
    ]
    expected = ({"a.w": {"step": 3, "exp_avg": 1.5}}, {"a.w": {"lr": 0.1}, "a.b": {"lr": 0.1}, "c": {"lr": 0.2}})
    assert unflatten_optimizer_state(flat, ["a.w", "a.b", "c"]) == expected
    assert unflatten_optimizer_state(NESTED, []) == expected


def test_what_is_no_state_is_refused():
    with pytest.raises(ValueError, match="parameters are numbered"):
        unflatten_optimizer_state({"state": {0: {}}, "param_groups": [{"params": [0]}]}, [])
    with pytest.raises(ValueError, match="'model.w' is not a key"):
        unflatten_optimizer_state({"model.w": 1}, [])


def test_options_are_checked():
    with pytest.raises(ValueError, match="set full_state_dict=True as well"):
        StateDictOptions(broadcast_from_rank0=True)
    StateDictOptions(broadcast_from_rank0=True, full_state_dict=True)
    with pytest.raises(TypeError, match="got bool"):
        StateDictOptions.of(True)
    theirs = {name: getattr(StateDictOptions(), name) for name in StateDictOptions.__slots__} | {"strict": False}
    assert StateDictOptions.of(SimpleNamespace(**theirs)) == StateDictOptions(strict=False)
    with pytest.raises(NotImplementedError, match="dsd_fqn_modifiers"):
        StateDictOptions.of(SimpleNamespace(**theirs | {"dsd_fqn_modifiers": "mine"}))
    with pytest.raises(NotImplementedError, match="dsd_fqn_modifiers"):
        StateDictOptions(dsd_fqn_modifiers="mine")
    assert StateDictOptions(False, False, False, False).keep_submodule_prefixes is False, "in torch's order"
