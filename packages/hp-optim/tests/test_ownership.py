"""Owners and exchanges, run in numpy for all ranks at once."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import take
from hp_optim.muon.ownership import OwnerPlan, Placed, assign, gathers_of, view
from hp_optim.muon.rules import MatrixRule, split

R = Replicate()


def placed(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    rule: MatrixRule | None = None,
    ranks: tuple[int, ...] | None = None,
) -> Placed:
    ranks = ranks or tuple(range(prod(mesh_shape)))
    return Placed("w", shape, split(shape, rule, "w"), ranks, mesh_shape, placements)


def read(tensors: list[np.ndarray], regions: Any) -> np.ndarray:
    return np.concatenate([view(tensors[n], r).reshape(-1) for n, r in regions] or [np.empty(0)])


def write(tensors: list[np.ndarray], regions: Any, stream: np.ndarray) -> None:
    at = 0
    for number, region in regions:
        target = view(tensors[number], region)
        target[...] = stream[at : at + target.size].reshape(target.shape)
        at += target.size
    assert at == stream.size


def all_to_all(sent: dict[int, np.ndarray], sizes: dict[int, tuple[int, ...]], world: tuple[int, ...]) -> Any:
    cut = {rank: np.split(sent[rank], np.cumsum(sizes[rank])[:-1]) for rank in world}
    return {rank: np.concatenate([cut[source][place] for source in world]) for place, rank in enumerate(world)}


def negate_each_matrix_once(plan: OwnerPlan) -> None:
    """Run a plan whose matrices are multiplied by minus one, and compare each rank's part with the global result."""
    rng, world = np.random.default_rng(0), plan.world
    whole = [rng.normal(size=each.shape) for each in plan.parameters]
    local, result = {}, {}
    for rank in world:
        local[rank] = [
            take(array, p.placements, p.mesh_shape, np.unravel_index(p.ranks.index(rank), p.mesh_shape)).copy()
            if rank in p.ranks
            else np.empty(0)
            for p, array in zip(plan.parameters, whole)
        ]
        result[rank] = [np.full_like(each, np.nan) for each in local[rank]]
    exchanges = {rank: plan.exchange(rank) for rank in world}
    batches = {rank: [np.full(b.elements, np.nan) for b in exchanges[rank].batches] for rank in world}
    sent = {rank: read(local[rank], exchanges[rank].sent) for rank in world}
    arrived = all_to_all(sent, {rank: exchanges[rank].send_sizes for rank in world}, world)
    for rank, exchange in exchanges.items():
        assert sum(exchange.receive_sizes) == arrived[rank].size
        write(batches[rank], exchange.received, arrived[rank])
        for number, own, batch, region in exchange.kept:
            write(batches[rank], [(batch, region)], read(local[rank], [(number, own)]))
        for batch, buffer in zip(exchange.batches, batches[rank]):
            for slot, (number, at) in enumerate(batch.members):
                matrix = plan.parameters[number].matrices[at]
                box = whole[number][tuple(slice(o, o + s) for o, s in zip(matrix.offsets, matrix.sizes))]
                own = buffer.reshape(len(batch.members), batch.rows, batch.columns)[slot]
                np.testing.assert_array_equal(own, box.reshape(batch.rows, batch.columns))
            buffer *= -1
    back = {rank: read(batches[rank], exchanges[rank].results_sent) for rank in world}
    arrived = all_to_all(back, {rank: exchanges[rank].results_send_sizes for rank in world}, world)
    for rank, exchange in exchanges.items():
        assert sum(exchange.results_receive_sizes) == arrived[rank].size
        write(result[rank], exchange.results_received, arrived[rank])
        for number, own, batch, region in exchange.kept:
            write(result[rank], [(number, own)], read(batches[rank], [(batch, region)]))
        for one, other in zip(local[rank], result[rank]):
            np.testing.assert_array_equal(-one, other)
    negate_by_gathers(plan, local)
    members = [member for exchange in exchanges.values() for batch in exchange.batches for member in batch.members]
    assert sorted(members) == [(n, at) for n, p in enumerate(plan.parameters) for at in range(len(p.matrices))]


def negate_by_gathers(plan: OwnerPlan, local: dict[int, list[np.ndarray]]) -> None:
    """Do the same with gathers of elements."""
    world = plan.world
    exchanges = {rank: plan.exchange(rank) for rank in world}
    gathers = {rank: gathers_of(exchanges[rank], [each.shape for each in local[rank]]) for rank in world}
    flat = {rank: np.concatenate([np.empty(0), *(each.reshape(-1) for each in local[rank])]) for rank in world}
    sizes = {rank: exchanges[rank].send_sizes for rank in world}
    arrived = all_to_all({rank: flat[rank][gathers[rank].sent] for rank in world}, sizes, world)
    made = {rank: -np.concatenate([flat[rank], arrived[rank]])[gathers[rank].batches] for rank in world}
    sizes = {rank: exchanges[rank].results_send_sizes for rank in world}
    back = all_to_all({rank: made[rank][gathers[rank].results_sent] for rank in world}, sizes, world)
    for rank in world:
        np.testing.assert_array_equal(np.concatenate([made[rank], back[rank]])[gathers[rank].locals], -flat[rank])


def ragged(shape: tuple[int, ...], units: tuple[int, ...]) -> RaggedShard:
    return RaggedShard(tuple(range(len(shape))), units)


HEADS = MatrixRule("w", "(h o) i", {"o": 3})
FUSED = MatrixRule("w", "(q | k | v) i", {"q": 6, "k": 4})
CONV = MatrixRule("w", "o (i kh kw)")
CASES = {
    "ragged": [
        placed((4, 6), (ragged((4, 6), (7, 0, 17)),), (3,)),
        placed((6, 4), (ragged((6, 4), (0, 24, 0)),), (3,)),
    ],
    "heads, ragged": [placed((12, 5), (ragged((12, 5), (31, 29)),), (2,), HEADS)],
    "fused, rows": [placed((12, 5), (Shard(0),), (4,), FUSED)],
    "fused, columns": [placed((12, 5), (Shard(1),), (3,), FUSED)],
    "tensor parallel": [
        placed((8, 6), (Shard(0),), (2,)),
        placed((6, 8), (Shard(1),), (2,)),
        placed((4, 4), (R,), (2,)),
    ],
    "experts": [placed((4, 3, 5), (Shard(0),), (2,)), placed((5, 3, 4), (Shard(0),), (2,))],
    "experts, inner dims": [placed((3, 4, 6), (Shard(1), Shard(2)), (2, 2))],
    "hsdp": [placed((5, 4), (R, ragged((5, 4), (9, 11))), (2, 2)), placed((3, 3), (R, ragged((3, 3), (9, 0))), (2, 2))],
    "tensor parallel under ragged": [
        placed((6, 8), (RaggedShard((0, 1), (5, 19)), Shard(1)), (2, 2)),
        placed((6, 8), (RaggedShard((0, 1), (24, 0)), Shard(0)), (2, 2)),
        placed((4, 5), (RaggedShard((0, 1), (13, 7)), R), (2, 2)),
    ],
    "ragged inner dims": [placed((3, 4, 5), (RaggedShard((1, 2), (7, 13)),), (2,))],
    "strided": [placed((8, 3), (StridedShard(0, 2), Shard(0)), (2, 2))],
    "both axes on one dim": [placed((9, 3), (Shard(0), Shard(0)), (2, 2))],
    "convolution": [placed((4, 3, 2, 2), (Shard(0),), (3,), CONV), placed((4, 3, 2, 2), (Shard(1),), (3,), CONV)],
    "another mesh of the same ranks": [
        placed((4, 6), (Shard(0), Shard(1)), (2, 2)),
        placed((8, 2, 3), (Shard(0),), (4,), ranks=(0, 2, 1, 3)),
    ],
    "a mesh inside": [placed((4, 6), (Shard(0),), (4,)), placed((6, 3), (Shard(0),), (2,), ranks=(1, 3))],
    "one rank": [placed((4, 6), (R,), (1,)), placed((3, 4, 6), (Shard(0),), (1,))],
    "no elements": [placed((0, 3), (Shard(0),), (2,)), placed((3, 4), (Shard(0),), (2,))],
}


@pytest.mark.parametrize("case", CASES)
def test_every_matrix_reaches_its_owner_and_its_result_all_holders(case: str):
    parameters = CASES[case]
    negate_each_matrix_once(assign(parameters, sorted({rank for each in parameters for rank in each.ranks})))


def llama(ranks: int, layers: int = 4) -> list[Placed]:
    """Blocks of llama 8B, each a flat buffer cut in equal pieces."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    total = sum(prod(shape) for shape in shapes)
    piece = -(-total // ranks)
    parameters, start = [], 0
    for shape in shapes:
        stop = start + prod(shape)
        edges = [min(max(piece * rank, start), stop) - start for rank in range(ranks + 1)]
        parameters.append(placed(shape, (ragged(shape, tuple(np.diff(edges).tolist())),), (ranks,)))
        start = stop
    return parameters * layers


@pytest.mark.parametrize(("ranks", "most"), [(2, 0.2), (4, 0.75), (8, 0.75), (64, 0.96)])
def test_few_bytes_are_sent_and_the_work_is_balanced(ranks: int, most: float):
    """Against an all-to-all of equal slices, of which each rank keeps one."""
    parameters = llama(ranks, layers=32)
    plan = assign(parameters, range(ranks))
    even = sum(prod(each.shape) for each in parameters) * (ranks - 1) / ranks
    assert plan.sent_elements() / even <= most
    assert plan.imbalance <= (1.05 if ranks <= 8 else 1.13)


def test_a_plan_is_the_same_whoever_makes_it_and_replicas_share_its_work():
    parameters = [placed((64, 64), (R, Shard(0)), (4, 2)) for _ in range(16)]
    one, other = assign(parameters, range(8)), assign(list(parameters), range(8))
    assert one.owners == other.owners and one.imbalance == 1.0
    assert {owner for owners in one.owners for owner in owners} == set(range(8))


def test_a_stack_of_experts_stays_where_it_is():
    plan = assign([placed((16, 8, 8), (Shard(0),), (4,)) for _ in range(3)], range(4))
    assert plan.sent_elements() == 0 and plan.imbalance == 1.0
    exchange = plan.exchange(2)
    assert exchange.send_sizes == exchange.receive_sizes == (0, 0, 0, 0)
    assert len(exchange.batches) == 1 and len(exchange.kept) == 3  # a run for each parameter


def test_a_thousand_ranks():
    plan = assign(llama(1024, layers=4), range(1024))
    assert len({owner for owners in plan.owners for owner in owners}) == len(plan.parameters)
    exchange = plan.exchange(511)
    assert sum(exchange.send_sizes) <= sum(prod(each.shape) for each in plan.parameters) / 1024 + 4
