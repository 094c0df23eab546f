"""Options of groups, kinds of parameters and gradients that an optimizer does not mean."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from hp_optim import AdamW, AdamW8bit, Muon

pytestmark = pytest.mark.framework("torch")


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit, Muon])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"weight_deca": 0.1},
            ValueError,
            r"has 'weight_deca', which would have no effect. Did you mean 'weight_decay'",
        ),
        ({"LR": 0.1}, ValueError, r"group 1 has 'LR', which would have no effect. Did you mean 'lr'"),
        ({"lr": "0.1"}, TypeError, r"lr must be a number, got '0.1'"),
        ({"lr": torch.ones(2)}, ValueError, r"lr must have one element, got shape \(2,\)"),
        ({"weight_decay": -1.0}, ValueError, r"weight_decay must be at least 0, got -1.0"),
    ],
)
def test_options_of_a_group_that_are_refused(kind: Any, options: dict[str, Any], error: type[Exception], text: str):
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(error, match=text) as caught:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], **options})
    assert len(optimizer.param_groups) == 1
    if meant := re.search(r"Did you mean '(\w+)'", str(caught.value)):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], meant[1]: 0.1})
        assert optimizer.param_groups[1][meant[1]] == 0.1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"betas": (1.5, 0.9)}, ValueError, r"AdamW: betas\[0\] must be at least 0 and less than 1, got 1.5"),
        ({"betas": 0.9}, TypeError, r"AdamW: betas must be two numbers, got 0.9"),
        ({"beta": (0.8, 0.9)}, ValueError, r"group 0 has 'beta', which would have no effect. Did you mean 'betas'"),
        ({"eps": -1.0}, ValueError, r"AdamW: eps must be at least 0, got -1.0"),
        ({"differentiable": True}, ValueError, r"group 0 has differentiable=True; give it to torch.optim.AdamW"),
        ({"decoupled_weight_decay": False}, ValueError, r"group 0 has decoupled_weight_decay=False"),
    ],
)
def test_options_of_a_group_of_adamw_that_are_refused(options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        AdamW([{"params": [nn.Parameter(torch.zeros(2))], **options}])
    if "torch.optim" in text or "decoupled" in text:
        torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(2))], **options}])


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit, Muon])
def test_what_a_program_wrote_into_the_list_of_groups(kind: Any):
    one, other = (nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    one.grad, other.grad = torch.ones(2, 2), torch.ones(2, 2)
    optimizer = kind([one])
    optimizer.param_groups.append({"params": [other]})
    with pytest.raises(ValueError, match=r"group 1 has no 'lr'. Add groups by add_param_group, which sets what they"):
        optimizer.step()
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": [other]})
    optimizer.param_groups[1]["params"].append(one)
    with pytest.raises(ValueError, match=r"is in group 0, too, and would be updated twice; take it out of one"):
        optimizer.step()
    optimizer.param_groups[1]["params"].pop()
    optimizer.step()
    assert torch.equal(one, other) and bool((one < 0).all())


def test_keys_that_programs_put_into_groups_are_theirs():
    keys = {"name": "x", "initial_lr": 1.0, "max_lr": 1.0, "min_lr": 0.0, "max_momentum": 0.9, "base_momentum": 0.8}
    keys |= {"lr_scale": 2.0, "lr_mult": 1.0, "wd_mult": 1.0, "layer_name": "a", "is_expert": True}
    for kind in (AdamW, AdamW8bit, Muon):
        assert kind([{"params": [nn.Parameter(torch.zeros(2, 2))], **keys}]).param_groups[0]["lr_scale"] == 2.0


@pytest.mark.parametrize("size", [(8, 8), (80, 80)])
def test_amsgrad_is_refused_by_adamw8bit_wherever_it_comes_from(size: tuple[int, int]):
    weight = nn.Parameter(torch.zeros(size))
    weight.grad = torch.ones(size)
    theirs, ours = torch.optim.AdamW([weight], amsgrad=True), AdamW8bit([("w", weight)], compiled=False)
    theirs.step()
    with pytest.raises(ValueError, match=r"AdamW8bit: group 0 has amsgrad=True, which takes one more state"):
        ours.load_state_dict(theirs.state_dict())
    ours.step()
    ours.param_groups[0]["amsgrad"] = True
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=r"AdamW8bit: the group of 'w' has amsgrad=True, which takes one more state"):
        ours.step()
    assert torch.equal(weight, before)
    other = AdamW([weight])
    other.load_state_dict(theirs.state_dict())
    other.step(), theirs.step()
    assert torch.equal(other.state[weight]["max_exp_avg_sq"], theirs.state[weight]["max_exp_avg_sq"])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_parameters_of_muon_are_floating_point(dtype: torch.dtype):
    weight = nn.Parameter(torch.zeros(3, 3, dtype=dtype), requires_grad=False)
    with pytest.raises(
        TypeError, match=rf"Muon: parameter 'w' is of {dtype}, and only floating-point ones are updated"
    ):
        Muon([("w", weight)])


@pytest.mark.not_on("torch-npu-sim", reason="it has no sparse tensors")
@pytest.mark.parametrize("dense_first", [False, True])
@pytest.mark.parametrize("kind", [AdamW, AdamW8bit, Muon])
def test_a_sparse_gradient_is_refused_before_anything_is_updated(kind: Any, dense_first: bool):
    first, embedding = nn.Parameter(torch.ones(3, 3)), nn.Embedding(4, 2, sparse=True)
    optimizer = kind([{"params": [("first", first)]}, {"params": embedding.named_parameters()}])
    if dense_first:
        first.grad, embedding.weight.grad = torch.ones(3, 3), torch.ones(4, 2)
        optimizer.step()
    first.grad, embedding.weight.grad = torch.ones(3, 3), None
    embedding(torch.tensor([1])).sum().backward()
    before = copy.deepcopy((first.detach(), optimizer.state_dict()["state"]))
    with pytest.raises(RuntimeError, match=rf"the gradient of 'weight' is sparse, and {kind.__name__} updates every"):
        optimizer.step()
    assert torch.equal(first, before[0])
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][number][key]) for key, value in state.items())
    weight = embedding.weight.detach().clone()
    kind([first]).step(), torch.optim.SparseAdam([embedding.weight]).step()
    dense = nn.Embedding(4, 2, _weight=weight.clone(), sparse=False)
    dense(torch.tensor([1])).sum().backward()
    kind(dense.parameters()).step()
    for each in (embedding.weight, dense.weight):
        assert not torch.equal(each[1], weight[1])


@pytest.mark.parametrize("kernel", [{"fused": False}, {"fused": True}, {}], ids=str)
def test_a_tensor_as_learning_rate_goes_with_any_kernel(kernel: dict[str, Any]):
    ours, theirs = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    lr = torch.tensor(0.05, dtype=torch.float64)
    one, other = AdamW([ours], lr=lr, **kernel), torch.optim.AdamW([theirs], lr=lr, fused=False)
    for step in range(3):
        for each in (ours, theirs):
            each.grad = torch.full((5,), step + 1.0, dtype=torch.float64)
        one.step(), other.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_hooks_of_torch_see_steps_and_states():
    weight = nn.Parameter(torch.ones(80, 80))
    for kind in (AdamW, AdamW8bit, Muon):
        options = {"compiled": False} if kind is AdamW8bit else {}
        optimizer, seen = kind([weight], **options), []
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})

        def loaded(_: Any, state: dict[str, Any], seen: list[str] = seen) -> None:
            seen.append(type(next(iter(state["state"][0].values()))).__name__)

        optimizer.register_load_state_dict_pre_hook(loaded)
        optimizer.register_load_state_dict_post_hook(lambda _, seen=seen: seen.append("loaded"))
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = optimizer.state_dict()
        assert state["more"] == 1
        optimizer.load_state_dict(state)
        assert seen == ["before", "after", "Tensor", "loaded"]
