"""Groups of an optimizer: which values each parameter gets, and which groups are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hp_plan import OptimizerGroup, ParallelPlan, PlanError, build_model, build_optimizer, build_schedule, lint
from hp_plan.extend import override, settings

pytestmark = pytest.mark.framework("torch")

NORMS = {"patterns": ["model.norm.weight", "model.layers.*.*norm.weight"], "weight_decay": 0.0}
EMBEDDINGS = {"patterns": ["model.embed_tokens.weight"], "lr_multiple": 0.1, "weight_decay": 0.2}
SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


def plan_of(*groups, mesh=None, tied=False, **optimizer) -> ParallelPlan:
    overrides = {**SIZES, **HEADS, "tie_word_embeddings": tied}
    tables = {"model": {"config": "LlamaConfig", "overrides": overrides}, "mesh": mesh or {}}
    return ParallelPlan.from_dict({**tables, "optimizer": {"lr": 0.5, "groups": list(groups), **optimizer}})


def values(optimizer, model):
    """Weight decay and learning rate of each parameter, by its name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [(names[id(each)], group) for group in optimizer.param_groups for each in group["params"]]
    assert sorted(name for name, _ in listed) == sorted(names.values()), "each parameter once"
    return {name: (group["weight_decay"], group["lr"]) for name, group in listed}


@pytest.mark.parametrize(
    "optimizer",
    [{"name": "adamw"}, {"name": "sgd"}, {"name": "muon"}, {"name": "adamw8bit"}, {"swap_slices": 2}],
    ids=str,
)
def test_each_parameter_has_the_values_of_its_group(optimizer):
    plan = plan_of(NORMS, EMBEDDINGS, **optimizer)
    model = build_model(plan)
    built = build_optimizer(plan, model.named_parameters())
    for name, got in values(built, model).items():
        norm, embedding = "norm" in name, "embed" in name
        assert got == (0.0, 0.5) if norm else (0.2, 0.05) if embedding else (0.01, 0.5), name


def test_a_multiple_follows_the_schedule():
    plan = ParallelPlan.from_dict(
        {
            "optimizer": {"name": "sgd", "lr": 1.0, "groups": [{"patterns": ["bias"], "lr_multiple": 0.25}]},
            "schedule": {"kind": "linear"},
            "run": {"steps": 4},
        }
    )
    layer = nn.Linear(2, 2)
    optimizer = build_optimizer(plan, layer.named_parameters())
    schedule = build_schedule(plan, optimizer)
    nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    for _ in range(2):
        layer.weight.grad, layer.bias.grad = torch.ones(2, 2), torch.ones(2)
        optimizer.step()
        schedule.step()
    # weight decay adds a hundredth of the weight of the first step, -1 or -0.25, to the second's gradient
    torch.testing.assert_close(layer.weight.detach(), torch.full((2, 2), -1.0 - 0.75 * 0.99))
    torch.testing.assert_close(layer.bias.detach(), torch.full((2,), -0.25 - 0.25 * 0.75 * 0.9975))


def test_groups_are_tables_of_a_file_and_a_value_of_the_command_line():
    plan = plan_of(NORMS, EMBEDDINGS)
    assert plan.optimizer.groups[1] == OptimizerGroup(("model.embed_tokens.weight",), 0.2, 0.1)
    assert "[[optimizer.groups]]\npatterns = [" in plan.to_toml()
    assert 'patterns = ["a.b"], lr_multiple = 2' in (text := 'optimizer.groups=[{patterns = ["a.b"], lr_multiple = 2}]')
    tables = override(plan.to_dict(), [text])
    changed = ParallelPlan.from_dict(tables)
    assert changed.optimizer.groups == (OptimizerGroup(("a.b",), lr_multiple=2.0),)
    listed = {setting.key: setting for setting in settings(changed, tables, [text])}["optimizer.groups"]
    assert (listed.value, listed.origin) == ([{"patterns": ["a.b"], "lr_multiple": 2.0}], "command line")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            [{"patterns": ["model.nrom.weight"], "weight_decay": 0.0}],
            "optimizer.groups[0].patterns[0]: 'model.nrom.weight' matches no parameter; did you mean "
            "'model.norm.weight'",
        ),
        (
            [NORMS, {"patterns": ["model.layers.1.*.weight"], "lr_multiple": 2.0}],
            "optimizer.groups[1]: model.layers.1.input_layernorm.weight and 1 more is matched by "
            "'model.layers.*.*norm.weight' in group 0 and by 'model.layers.1.*.weight' in group 1; a parameter is in "
            "one group; make the patterns exclude each other, or remove one",
        ),
        ([{"weight_decay": 0.0}], "optimizer.groups[0].patterns: got no pattern, so no parameter is in the group"),
        (
            [{"patterns": ["lm_head.weight"]}],
            "optimizer.groups[0]: the group has the optimizer's own values; give weight_decay or lr_multiple, or leave",
        ),
    ],
)
def test_groups_that_are_refused(groups, expected):
    (found,) = lint(plan_of(*groups))
    assert str(found).startswith(expected)


def test_a_list_of_tables_is_not_a_table():
    with pytest.raises(PlanError) as raised:
        ParallelPlan.from_dict({"optimizer": {"groups": EMBEDDINGS}})
    assert "optimizer.groups: got {'patterns': ['model.embed_tokens.weight']" in str(raised.value)
    assert "expected a list of tables, each under [[two brackets]]" in str(raised.value)
    with pytest.raises(PlanError, match=r"groups\[0\]\.lr_multiplier: \[.*\] has no key.*did you mean 'lr_multiple'"):
        ParallelPlan.from_dict({"optimizer": {"groups": [{**EMBEDDINGS, "lr_multiplier": 2}]}})


def test_an_optimizer_of_a_program_is_refused_alike():
    layer = nn.Linear(2, 2)
    groups = [{"patterns": ["*"], "weight_decay": 0.0}, {"patterns": ["bias"], "lr_multiple": 2.0}]
    plan = ParallelPlan.from_dict({"optimizer": {"groups": groups}})
    with pytest.raises(PlanError, match=r"bias is matched by '\*' in group 0 and by 'bias' in group 1; a parameter is"):
        build_optimizer(plan, layer.named_parameters())
    plan = ParallelPlan.from_dict({"optimizer": {"groups": groups[1:]}})
    with pytest.raises(ValueError, match=r"groups in \[optimizer\] goes by names of parameters; pass model\.named"):
        build_optimizer(plan, layer.parameters())
    layer.bias.requires_grad_(False)
    with pytest.raises(PlanError, match=r"groups\[0\]\.patterns\[0\]: 'bias' matches no trained parameter"):
        build_optimizer(plan, layer.named_parameters())


def test_a_tied_weight_of_two_stages_is_in_one_group():
    (found,) = lint(plan_of(EMBEDDINGS, mesh={"pp": 2}, tied=True))
    assert str(found) == (
        "optimizer.groups[0]: model.embed_tokens.weight and lm_head.weight are one tensor, on two stages, and only "
        "model.embed_tokens.weight is in the group; let its patterns match both"
    )
    both = {**EMBEDDINGS, "patterns": ["model.embed_tokens.weight", "lm_head.weight"]}
    assert lint(plan_of(both, mesh={"pp": 2}, tied=True)) == ()
    assert lint(plan_of(EMBEDDINGS, tied=True)) == (), "in one process it has one name"
