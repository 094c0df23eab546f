"""What may happen around forward and backward: evaluation, checkpointing, several passes, errors, nested outputs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from fsdp_models import (
    Block,
    Net,
    batch,
    compared,
    data_mesh,
    groups_of,
    loss_of,
    pair,
    same_gradients,
    seeded,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_fsdp import HSDPModule, fully_shard
from hp_fsdp.torch.steps.hooks import map_tensors, tensors
from hp_platform import count_collectives
from hp_testing import on_ranks

pytestmark = pytest.mark.device


@on_ranks(2)
def test_collectives_of_a_step_are_two_gathers_and_one_scatter_a_group():
    _, model = pair()
    compared(model)
    for step in range(3):
        with count_collectives() as counts:
            loss_of(model(batch(step)[1])).backward()
        # The root stays gathered between forward and backward.
        assert dict(counts) == {"all_gather": 2 * 3 + 1, "reduce_scatter": 4}
    model.set_reshard_after_forward(True)
    with count_collectives() as counts:
        loss_of(model(batch()[1])).backward()
    assert dict(counts) == {"all_gather": 2 * 4, "reduce_scatter": 4}
    model.set_reshard_after_forward(False)
    with count_collectives() as counts:
        loss_of(model(batch()[1])).backward()
    assert dict(counts) == {"all_gather": 4, "reduce_scatter": 4}


@on_ranks(2)
def test_at_most_two_groups_besides_the_root_are_gathered_at_once():
    _, model = pair(Deep)
    groups = groups_of(model)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        gathered = [group for group in groups[1:] if any(b.full_storage.nbytes() for b in group.buckets if b.prepared)]
        most = max(most, len(gathered))

    for block in model.blocks:
        block.up.register_forward_hook(look)
        block.up.register_full_backward_hook(look)
    for step in range(3):
        most = 0
        loss_of(model(batch(step)[1])).backward()
        assert most == 2, f"step {step}: {most}"
        assert all(b.full_storage.nbytes() == 0 for group in groups for b in group.buckets)


class Deep(Net):
    def __init__(self) -> None:
        super().__init__(blocks=5)


@on_ranks(1, 2)
def test_evaluation_between_steps():
    reference, model = pair()
    for step in range(2):
        with torch.no_grad() if step else torch.inference_mode():
            whole, own = batch(7)
            assert torch.allclose(model(own), reference(own), atol=1e-12)
        assert not any(group.unsharded for group in groups_of(model))
        train(reference, model, steps=2)


@on_ranks(2)
def test_several_forwards_before_backward():
    def run(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(net(x)) + 2 * loss_of(net(x * 0.5))

    train(*pair(), run=run)


@on_ranks(2)
def test_two_backwards_of_separate_losses():
    reference, model = pair()
    for net, x in zip((reference, model), batch()):
        losses = loss_of(net(x)), loss_of(net(x * 0.5))
        losses[0].backward()
        losses[1].backward()
    same_gradients(model, reference)


@on_ranks(2)
def test_a_graph_that_is_kept_for_a_second_backward():
    reference, model = pair()
    for net, x in zip((reference, model), batch()):
        loss = loss_of(net(x))
        loss.backward(retain_graph=True)
        loss.backward()
    same_gradients(model, reference)


class Repeated(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[0], self.blocks[2]):
            x = block(x)
        return self.last(x)


@on_ranks(1, 2)
def test_a_module_called_several_times():
    train(*pair(Repeated))


class Checkpointed(Net):
    """Checkpoints around the sharded modules, around a run of them, or inside them."""

    kind = "around"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "several":
            x = checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=False)
            return self.last(checkpoint(self.blocks[2], x, use_reentrant=False))
        for block in self.blocks:
            if self.kind == "inside":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return self.last(x)


class Inside(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["around", "several", "inside", "reentrant"])
def test_activation_checkpointing(kind: str):
    def make() -> nn.Module:
        net = Checkpointed()
        net.kind = kind
        if kind == "inside":
            net.blocks = nn.ModuleList(Inside() for _ in range(3))
        return net

    train(*pair(make))


class Failing(Net):
    fail = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if self.fail == f"forward {index}":
                raise KeyError(self.fail)
            x = block(x)
            if self.fail == f"backward {index}":
                x.register_hook(_raise)
        return self.last(x)


def _raise(_: torch.Tensor) -> None:
    raise KeyError("in backward")


@on_ranks(1, 2)
@pytest.mark.parametrize("fail", ["forward 0", "forward 2", "backward 1"])
def test_after_an_error_the_next_step_works(fail: str):
    reference, model = pair(Failing)
    train(reference, model, steps=2)
    model.fail = fail
    with pytest.raises(KeyError):
        loss_of(model(batch()[1])).backward()
    model.fail = ""
    model.zero_grad()
    train(reference, model, steps=2)
    assert not any(group.unsharded or group.gathering for group in groups_of(model))


Pair = namedtuple("Pair", "one two")


@dataclasses.dataclass
class Output:
    hidden: Any
    extra: Any = None


class Nested(nn.Module):
    """Takes and gives tensors in every kind of container."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner(width) for _ in range(2))
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> Any:
        state = Output(OrderedDict(h=self.first(x)))
        for block in self.blocks:
            state = block(scale=2.0, state=state)
        return {"y": [self.last(state.hidden["h"]), None], "n": 3}


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, *, state: Output, scale: float) -> Output:
        hidden = self.linear(state.hidden["h"]) * scale
        return Output(OrderedDict(h=hidden), extra=Pair(hidden.detach(), (hidden.mean(), "text")))


@on_ranks(2)
def test_nested_inputs_and_outputs():
    reference, model = pair(Nested)
    train(reference, model, run=lambda net, x: loss_of(net(x)["y"][0]))
    with count_collectives() as counts:
        model(batch()[1])["y"][0].sum().backward()
    assert counts["all_gather"] == 2 * 2 + 1, "the hooks found the outputs inside their containers"


def test_trees_keep_their_types_and_what_does_not_change():
    one, two = torch.ones(1), torch.zeros(1)
    tree = {"a": Pair(one, [two]), "b": Output(one, "text"), "c": (3, None), "d": Output(two)}
    assert [id(t) for t in tensors(tree)] == [id(t) for t in (one, two, one, two)]
    assert map_tensors(lambda t: t, tree) is tree
    made = map_tensors(lambda t: t + 1 if t is one else t, tree)
    assert type(made["a"]) is Pair and made["a"].one == 2 and made["a"].two is tree["a"].two
    assert made["b"].hidden == 2 and made["b"].extra == "text" and tree["b"].hidden is one
    assert made["c"] is tree["c"] and made["d"] is tree["d"]


@on_ranks(2)
def test_explicit_prefetch_and_manual_unshard():
    reference, model = pair()
    for one, two in zip(model.blocks, model.blocks[1:]):
        one.set_modules_to_forward_prefetch([two])
        two.set_modules_to_backward_prefetch([one])
    train(reference, model)
    handle = model.unshard(async_op=True)
    handle.wait()
    assert torch.equal(model.first.weight, dict(model.named_parameters())["first.weight"])
    assert model.first.weight.shape == (7, 5) and type(model.first.weight) is nn.Parameter
    model.reshard()
    train(reference, model, steps=1)


@on_ranks(2)
def test_a_part_of_the_model_runs_alone_first():
    reference, model = pair()
    own = torch.randn(2, 7, dtype=torch.float64)
    assert torch.allclose(model.blocks[1](own), reference.blocks[1](own), atol=1e-12)
    train(reference, model)
    with torch.no_grad():
        assert torch.allclose(model.blocks[1](own), reference.blocks[1](own), atol=1e-12)
    train(reference, model, steps=1)


@on_ranks(2)
def test_groups_inside_groups():
    reference, model = seeded(Net), seeded(Net)
    fully_shard(model.blocks[1].up, data_mesh())
    for block in model.blocks:
        fully_shard(block, data_mesh())
    fully_shard(model, data_mesh())
    train(reference, model)


@on_ranks(1)
def test_the_class_is_a_subclass_of_its_own_and_of_hsdp_module():
    model = fully_shard(seeded(Net), data_mesh())
    assert (
        isinstance(model, Net)
        and isinstance(model, HSDPModule)
        and (type(model).__name__, type(model).__qualname__) == ("Net", "HSDPNet")
    )
    assert type(fully_shard(seeded(Net), data_mesh())) is type(model)


@on_ranks(2)
def test_ranges_in_a_profile_are_named_after_modules():
    _, model = pair()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of(model(batch()[1])).backward()
    names = {event.key for event in profile.key_averages()}
    assert {"hp.fsdp.all_gather(blocks.0)", "hp.fsdp.reduce_scatter(blocks.2)", "hp.fsdp.all_gather(Net)"} <= names
