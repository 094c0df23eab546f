"""The setters that change how a group communicates: by value, and by what was called."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, batch, compared, data_mesh, groups_of, loss_of, pair, same_gradients, seeded, train
from torch import nn

from hp_dtensor import distribute_tensor, init_device_mesh
from hp_fsdp import fully_shard
from hp_platform import collectives, count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


def models(*args: Any, **options: Any) -> tuple[Any, Any]:
    """`pair`, of models with attributes of their own."""
    return pair(*args, **options)


def step(reference: Any, model: Any) -> None:
    """Backward on both."""
    loss_of(reference(batch()[0])).backward()
    loss_of(model(batch()[1])).backward()


def everywhere(model: nn.Module, setter: str, *args: Any) -> None:
    """Calls a setter that acts on a module's own group on every sharded module."""
    for group in groups_of(model):
        getattr(group.module, setter)(*args)


@on_ranks(1, 2)
def test_all_reduce_hook_changes_the_reduced_pieces(ranks: int):
    reference, model = models()
    pieces: list[int] = []

    def hook(piece: torch.Tensor) -> None:
        pieces.append(piece.numel())
        piece.mul_(2)

    everywhere(model, "set_all_reduce_hook", hook)
    for _ in range(2):
        step(reference, model)
    for parameter in reference.parameters():
        parameter.grad = parameter.grad * 2  # type: ignore[operator]
    same_gradients(model, reference)
    assert (
        pieces
        == [b.layout.piece for g in [*reversed(groups_of(model)[1:]), groups_of(model)[0]] for b in g.buckets] * 2
    )


@on_ranks(2)
def test_all_reduce_hook_on_two_axes_follows_the_all_reduce():
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("replicate", "shard"))
    reference, model = models(mesh=mesh)
    everywhere(model, "set_all_reduce_hook", lambda piece: piece.add_(0))
    step(reference, model)
    same_gradients(model, reference)
    with pytest.raises(ValueError, match="stream cannot be set on a mesh of two axes"):
        model.set_all_reduce_hook(print, stream=object())


@on_ranks(2)
def test_sums_only():
    reference, model = models()
    everywhere(model, "set_force_sum_reduction_for_comms", True)
    operations = []
    former = collectives.reduce_scatter

    def noted(output: Any, tensor: Any, op: str, **options: Any) -> Any:
        operations.append(op)
        return former(output, tensor, op, **options)

    collectives.reduce_scatter = noted
    try:
        step(reference, model)
    finally:
        collectives.reduce_scatter = former
    same_gradients(model, reference)
    assert operations == ["sum"] * 4
    model.set_reduce_scatter_divide_factor(4.0)  # torch's older name; the module's own group
    model.zero_grad()
    reference.zero_grad()
    step(reference, model)
    for parameter in (*reference.first.parameters(), *reference.last.parameters()):
        parameter.grad.mul_(2 / 4)
    same_gradients(model, reference)


class Custom:
    """A user's collective, by torch's functions, with memory of its own."""

    def __init__(self, gathers: bool) -> None:
        self.gathers = gathers
        self.allocated = self.called = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated += 1
        return torch.full(tuple(size), float("nan"), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any = None, async_op: bool = False
    ) -> Any:
        self.called += 1
        if self.gathers:
            parts = list(output_tensor.chunk(group.size()))
            return dist.all_gather(parts, input_tensor.clone(), group=group, async_op=async_op)
        assert op == dist.ReduceOp.SUM
        # Not every backend here reduces float64, or reduces and scatters.
        everyones = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(everyones, input_tensor, group=group)
        whole = torch.stack(everyones).sum(0)
        size = output_tensor.numel()
        output_tensor.copy_(whole[group.rank() * size : (group.rank() + 1) * size])
        return None


@on_ranks(2)
def test_custom_collectives_are_what_is_called():
    reference, model = models()
    gather, scatter = Custom(True), Custom(False)
    with pytest.raises(
        NotImplementedError, match="To gather through memory of your own, give set_custom_all_gather an"
    ):
        model.set_symm_mem_for_comm()
    everywhere(model, "set_custom_all_gather", gather)
    everywhere(model, "set_custom_reduce_scatter", scatter)
    compared(model)
    with count_collectives() as counts:
        train(reference, model, steps=2)
    assert not {"all_gather", "reduce_scatter"} & set(counts)
    assert gather.called == gather.allocated > 8
    assert scatter.called == 2 * 4 and scatter.allocated == 2 * scatter.called


@on_ranks(4)
def test_custom_all_reduce_is_what_replicas_are_reduced_by():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    reference, model = models(mesh=mesh)
    called: list[str] = []

    def reduce(piece: torch.Tensor, *, op: str, group: Any, async_op: bool) -> Any:
        assert async_op and group == mesh.get_group("replicate")
        called.append(op)
        return collectives.all_reduce(piece, op, group=group, async_op=True)

    model.set_custom_all_reduce(reduce)
    train(reference, model, steps=2)
    assert called == ["avg"] * len(called) and len(called) == 2 * sum(len(each.buckets) for each in groups_of(model))


@on_ranks(2)
def test_reduce_scatter_in_a_group_of_its_own():
    reference, model = models()
    model.set_separate_reduce_scatter_group()
    groups = []
    former = collectives.reduce_scatter

    def noted(output: Any, tensor: Any, op: str, *, group: Any, **options: Any) -> Any:
        groups.append(group)
        return former(output, tensor, op, group=group, **options)

    collectives.reduce_scatter = noted
    try:
        train(reference, model, steps=1)
        shard = model._hsdp_group.axes.shard_group
        assert len(set(groups)) == 1 and groups[0] is not shard
        assert dist.get_process_group_ranks(groups[0]) == [0, 1]
        groups.clear()
        model.set_separate_reduce_scatter_group(False)
        train(reference, model, steps=1)
        assert set(groups) == {shard}
    finally:
        collectives.reduce_scatter = former


def same_parts(model: nn.Module, reference: nn.Module) -> None:
    """`same_gradients`, where a rank that owns nothing of a parameter may have None."""
    parameters: Any = model.named_parameters()
    for (name, parameter), expected in zip(parameters, reference.parameters()):
        if expected.grad is None or parameter.grad is None:
            assert parameter.grad is None and (expected.grad is None or not parameter.to_local().numel()), name
            continue
        whole: Any = distribute_tensor(expected.grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        torch.testing.assert_close(parameter.grad.to_local(), whole.to_local(), msg=lambda text, n=name: f"{n}: {text}")


class Branches(Net):
    """Takes a branch that may be left out of the loss."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        aside = self.blocks[1](x)
        x = self.blocks[2](self.blocks[0](x))
        return self.last(x), aside


@on_ranks(2)
def test_groups_that_backward_reaches_on_some_ranks_only():
    reference, model = models(Branches)
    model.blocks[1].set_reduce_scatter_unused_params(True)
    for turn in range(3):
        for net, x in ((reference, batch(turn)[0]), (model, batch(turn)[1])):
            out, aside = net(x)
            if net is reference:
                aside = aside.chunk(2)[0] if turn < 2 else None
                loss = loss_of(out) + (0 if aside is None else aside.square().sum() / 2)
            else:
                used = dist.get_rank() == 0 and turn < 2
                loss = loss_of(out) + (aside.square().sum() if used else 0)
            loss.backward()
        same_parts(model, reference)
        if turn != 1:  # gradients of a second pass are added
            model.zero_grad()
            reference.zero_grad()
    model.blocks[1].set_reduce_scatter_unused_params(False)
    assert model.blocks[1]._hsdp_group.reshard_after_forward is None


@on_ranks(2)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_more_reductions_under_way(most: int):
    reference, model = models()
    model.set_reduce_scatter_max_input_buffers(most)
    compared(model)
    context, seen = model._hsdp_group.context, []
    former = context.started

    def started(group: Any, reductions: Any) -> None:
        former(group, reductions)
        seen.append(len(context.reductions))

    context.started = started
    step(reference, model)
    same_gradients(model, reference)
    assert max(seen) == most


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 5)
        self.up = nn.Linear(5, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.up(self.table(x))))


@on_ranks(2)
def test_an_embedding_is_not_gathered_in_backward():
    reference: Any = seeded(Table)
    model: Any = copy.deepcopy(reference)
    for part in (model.table, model.up):
        fully_shard(part, data_mesh())
    fully_shard(model, data_mesh())
    ids = torch.arange(8, device=device_type()).view(2, 4)
    mine = ids[dist.get_rank()][None]
    compared_counts = []
    for unshard in (True, False):
        model.table.set_unshard_in_backward(unshard)
        for _ in range(2):
            model.zero_grad()
            reference.zero_grad()
            loss_of(reference(ids)).backward()
            with count_collectives() as counts:
                loss_of(model(mine)).backward()
            same_gradients(model, reference)
        compared_counts.append(counts["all_gather"])
    assert compared_counts == [5, 4]
    model.up.set_unshard_in_backward(False)
    with pytest.raises(RuntimeError, match=r"backward needs parameter 'weight' of up, which was freed after forward"):
        loss_of(model(mine)).backward()
    model.up.set_unshard_in_backward(True)
    model.zero_grad()
    loss_of(model(mine)).backward()
    same_gradients(model, reference)


class Event:
    waited = 0

    def wait(self) -> None:
        self.waited += 1


@on_ranks(1)
def test_an_event_is_waited_for_once():
    _, model = models()
    event = Event()
    model.set_post_optim_event(event)
    for _ in range(2):
        loss_of(model(batch()[1])).backward()
    assert event.waited == 1
    with pytest.raises(TypeError, match=r"expected an event, with wait\(\), got str"):
        model.set_post_optim_event("later")


@on_ranks(2)
def test_the_state_after_an_error_can_be_reset():
    reference, model = models()
    compared(model)

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("in backward")

    out = model(batch()[1])
    out.register_hook(lambda g: g)
    handle = model.blocks[1].register_full_backward_hook(lambda *_: fail(out))
    with pytest.raises(KeyError, match="in backward"):
        loss_of(model(batch()[1])).backward()
    handle.remove()
    model.reset_iter_state()
    assert not any(group.unsharded or group.in_backward for group in groups_of(model))
    model.zero_grad()
    step(reference, model)
    same_gradients(model, reference)
    with pytest.raises(RuntimeError, match="reset_iter_state: blocks.1 is inside of another sharded module.*one, Net"):
        model.blocks[1].reset_iter_state()


REFUSED = [
    ("set_all_reduce_hook", (3,), TypeError, "expected a function of a tensor, got int"),
    ("set_custom_all_gather", (print,), TypeError, r"has allocate\(size, dtype=, device=\).*got builtin_function"),
    ("set_custom_reduce_scatter", (None,), TypeError, "got NoneType"),
    ("set_custom_all_reduce", (3,), TypeError, "expected a function of a tensor, got int"),
    ("set_custom_all_reduce", (print,), ValueError, "reduced over no replicate axis. Give fully_shard a mesh of two"),
    ("set_reduce_scatter_max_input_buffers", (True,), TypeError, "must be an int, got bool"),
    ("set_reduce_scatter_max_input_buffers", (0,), ValueError, "must be 1 or more, got 0"),
    ("set_symm_mem_for_comm", (), NotImplementedError, "has no staging buffers to place.*set_custom_all_gather"),
    ("set_allocate_memory_from_process_group_for_comm", (True,), NotImplementedError, "no staging buffers to place"),
]


@on_ranks(1)
@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_is_refused(index: int):
    setter, args, error, text = REFUSED[index]
    _, model = models()
    with pytest.raises(error, match=text):
        getattr(model, setter)(*args)
    model.set_allocate_memory_from_process_group_for_comm(False)


@on_ranks(1)
def test_deterministic_groups_refuse_what_they_would_not_follow():
    model = fully_shard(seeded(Net), data_mesh(), deterministic=True)
    for setter, args in (
        ("set_all_reduce_hook", (print,)),
        ("set_custom_reduce_scatter", (Custom(False),)),
        ("set_custom_all_reduce", (print,)),
        ("set_force_sum_reduction_for_comms", (True,)),
        ("set_reduce_scatter_unused_params", (True,)),
    ):
        with pytest.raises(NotImplementedError, match=rf"{setter}: fully_shard\(deterministic=True\) adds gradients"):
            getattr(model, setter)(*args)
