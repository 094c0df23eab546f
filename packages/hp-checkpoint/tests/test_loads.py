"""What a load sets: the tensors and values of the places that a state names, all of them or, if it is refused, none."""

from __future__ import annotations

import numpy as np
import pytest

from hp_checkpoint import StandardLoadPlanner, convert_full_checkpoint_to_dcp, load, save
from hp_testing import as_array, as_tensor

PARTIAL = StandardLoadPlanner(allow_partial_load=True)


def tensor(value):
    return as_tensor(np.full(3, value, np.float32))


def loaded(state, folder, **options):
    load(state, checkpoint_id=folder, no_dist=True, **options)
    return state


@pytest.fixture(params=["own", "dcp"])
def saved(request, tmp_path):
    """Return what saves a state as a folder of ours, or of torch.distributed.checkpoint."""

    def saved(state):
        save(state, checkpoint_id=tmp_path / "c", no_dist=True)
        if request.param == "own":
            return tmp_path / "c"
        convert_full_checkpoint_to_dcp(tmp_path / "c", tmp_path / "dcp", "torch")
        return tmp_path / "dcp"

    return saved


def test_a_part_of_a_state_gets_the_tensors_of_its_own_places(saved):
    """Also where the checkpoint has a tensor of the same name elsewhere."""
    folder = saved({"w": tensor(1), "model": {"w": tensor(2)}, "state": {"v": tensor(3)}})
    for parts in (("w",), ("model",), ("w", "model"), ("state", "w")):
        state = {"w": tensor(0), "model": {"w": tensor(0)}, "state": {"v": tensor(0)}}
        found = loaded({part: state[part] for part in parts}, folder)
        values = {"w": 1.0, "model": 2.0, "state": 3.0}
        for part, value in found.items():
            for each in value.values() if isinstance(value, dict) else [value]:
                assert as_array(each).tolist() == [values[part]] * 3, (parts, part)


@pytest.mark.parametrize("state", [{"w": 1}, {"state": {"w": 1}}, {"v": 1}, {"model": {"v": 1}}])
def test_what_a_checkpoint_has_elsewhere_is_lacking(saved, state):
    """A partial load leaves it as it is, any other is refused."""

    def wanted(value):
        return {key: wanted(each) for key, each in value.items()} if isinstance(value, dict) else tensor(value)

    folder = saved({"model": {"w": tensor(2)}, "state": {"v": tensor(3)}})
    with pytest.raises(
        ValueError, match="lacks 1 of 1 tensors|is not in the checkpoint, which has|has 'v' in another place"
    ):
        loaded(wanted(state), folder)
    found = loaded(wanted(state), folder, planner=PARTIAL)
    inner = next(iter(found.values()))
    assert as_array(next(iter(inner.values())) if isinstance(inner, dict) else inner).tolist() == [1.0] * 3
    named = loaded({"model": {"w": tensor(0)}, "state": {"v": tensor(0)}}, folder)  # as they were saved
    assert [as_array(named[part][key]).tolist() for part, key in (("model", "w"), ("state", "v"))] == [
        [2.0] * 3,
        [3.0] * 3,
    ]


def test_a_load_that_is_refused_changes_nothing(saved):
    folder = saved({"model": {"w": tensor(2)}, "step": 5, "rates": [0.5, {"a": 1}]})
    cases = [
        ({"stepp": 0}, r"'stepp' is not in the checkpoint, which has \['model', 'step', 'rates'\]"),
        ({"rates": {"a": 0}}, "'rates' is a dictionary, the checkpoint has"),
        ({"rates": [0, {"b": 0}]}, "'rates.1.b' is not in the checkpoint"),
        ({"model": {"w": 1}}, "'model.w' can't be read: it is a tensor in the checkpoint"),
    ]
    for more, text in cases:
        own = tensor(0)
        state = {"model": {"w": own}, "step": 0} | more
        with pytest.raises(ValueError, match=text):
            loaded(state, folder)
        assert as_array(own).tolist() == [0.0] * 3 and state["step"] == 0


def test_an_empty_dictionary_takes_values_and_no_tensors(saved):
    """Such are the states of an optimizer before its first step: a load would leave it without moments."""
    options = [{"lr": 0.5, "params": [0]}]
    moments = {"step": tensor(2), "exp_avg": tensor(4)}
    folder = saved({"optimizer": {"state": {0: moments}, "param_groups": options}, "data": {"next": 5}})
    data = {}
    found = loaded({"data": data, "optimizer": {"param_groups": [{"lr": 0.0, "params": []}]}}, folder)
    assert data == {"next": 5} and found["optimizer"]["param_groups"] == options
    own = {"optimizer": {"state": {0: {"step": tensor(0), "exp_avg": tensor(0)}}}}
    assert as_array(loaded(own, folder)["optimizer"]["state"][0]["exp_avg"]).tolist() == [4.0] * 3
    text = r"'optimizer.state' is empty, and the checkpoint has tensors in it, .* Make them first, as an optimizer does"
    for options in ({}, {"planner": PARTIAL}):
        fresh = {"optimizer": {"state": {}, "param_groups": [{"lr": 0.0, "params": [0]}]}}
        with pytest.raises(ValueError, match=text):
            loaded(fresh, folder, **options)
        assert fresh["optimizer"]["param_groups"][0]["lr"] == 0.0
        del fresh["optimizer"]["state"]
        assert loaded(fresh, folder, **options)["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_lists_of_the_same_length_take_the_tensors_of_lists_and_tuples(tmp_path):
    save({"list": [tensor(1), 5], "pair": (tensor(2), 6)}, checkpoint_id=tmp_path / "c", no_dist=True)
    for name, own in (("list", [tensor(0)]), ("pair", [tensor(0)]), ("pair", (tensor(0), 0))):
        with pytest.raises(ValueError, match=f"'{name}' is a .* with tensors, .*; use lists of the same length"):
            loaded({name: own}, tmp_path / "c")
    found = loaded({"list": [tensor(0), 0], "pair": [tensor(0), 0]}, tmp_path / "c")
    assert [[as_array(one).tolist(), two] for one, two in found.values()] == [[[1.0] * 3, 5], [[2.0] * 3, 6]]


def test_a_tied_tensor_is_loaded_from_the_name_that_the_checkpoint_has(saved):
    folder = saved({"model": {"head": tensor(2)}})
    tied = tensor(0)
    loaded({"model": {"embed": tied, "head": tied}}, folder, planner=PARTIAL)
    assert as_array(tied).tolist() == [2.0] * 3


def test_one_tensor_in_two_parts_takes_one_value(saved):
    folder = saved({"model": {"w": tensor(2)}, "mean": {"w": tensor(3)}, "same": {"w": tensor(2)}})
    tied = tensor(0)
    with pytest.raises(ValueError, match="'mean.w' and 'model.w' are one tensor here, and have different values"):
        loaded({"model": {"w": tied}, "mean": {"w": tied}}, folder)
    loaded({"model": {"w": tied}, "same": {"w": tied}}, folder)
    assert as_array(tied).tolist() == [2.0] * 3
