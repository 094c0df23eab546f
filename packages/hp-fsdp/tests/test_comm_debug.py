"""CommDebugMode tells of each collective of `fully_shard` the module whose group it is for."""

from __future__ import annotations

import torch
from fsdp_models import batch, compared, data_mesh, groups_of, loss_of, pair

from hp_dtensor import init_device_mesh
from hp_dtensor.debugging.debug import CommDebugMode
from hp_testing import device_type, on_ranks

FORWARD = [("Net", "all_gather"), *((f"Net.blocks.{i}", "all_gather") for i in range(3))]


def seen(comm: CommDebugMode, phase: str) -> list[tuple[str, str]]:
    return [(event.module, event.kind) for event in comm.events if event.phase == phase]


@on_ranks(2)
def test_a_groups_collectives_are_its_modules():
    """Ahead of time or behind: the second step gathers the first block inside the root's pre-hook."""
    mesh = data_mesh()
    _, model = pair(mesh=mesh)
    compared(model)
    for step in range(2):
        with CommDebugMode(mesh=mesh) as comm:
            loss_of(model(batch(step)[1])).backward()
        assert seen(comm, "forward") == FORWARD
        assert seen(comm, "backward") == [
            ("Net.blocks.2", "all_gather"),
            ("Net.blocks.1", "all_gather"),
            ("Net.blocks.2", "reduce_scatter"),
            ("Net.blocks.0", "all_gather"),
            ("Net.blocks.1", "reduce_scatter"),
            ("Net.blocks.0", "reduce_scatter"),
            ("Net", "reduce_scatter"),
        ]
        assert all(event.file and event.axis == "dp_shard" for event in comm.events)


@on_ranks(4)
def test_replicas_are_summed_behind_the_next_groups_backward():
    mesh = init_device_mesh(device_type(), (2, 2), ("replicate", "shard"))
    _, model = pair(mesh=mesh)
    compared(model)
    with CommDebugMode(mesh=mesh) as comm:
        loss_of(model(batch()[1])).backward()
    summed = [(event.module, event.axis) for event in comm.events if event.kind == "all_reduce"]
    assert summed == [(name, "replicate") for name in (*(f"Net.blocks.{i}" for i in (2, 1, 0)), "Net")]


@on_ranks(2)
def test_of_a_backward_alone_the_names_are_known_too():
    _, model = pair()
    loss = loss_of(model(batch()[1]))
    with CommDebugMode() as comm:
        loss.backward()
    names = {"Net", *(f"Net.blocks.{i}" for i in range(3))}
    assert {event.module for event in comm.events} == names


@on_ranks(2)
def test_parameters_that_are_asked_for_before_the_first_forward():
    _, model = pair()
    with CommDebugMode() as comm:
        model.blocks[1].unshard()
    assert [(event.phase, event.module) for event in comm.events] == [("forward", "Block")]
    with torch.no_grad():
        model(batch()[1])
    assert all(len(group.modules) == 2 for group in groups_of(model))
