"""Who computes whose samples again.

Note [Rotation]
    Ranks that compute a part of the batch together are a *copy*: those of `pp`, `cp` and `tp`, and of `ep` those whose
    tokens come to the same experts. In the k-th computation of a step each copy computes the samples of the k-th copy
    after it, each rank with the tokens, layers and heads that it always has. So each rank does what its counterpart in
    another copy has done, and random numbers follow the samples (Note [Draws of a step] in `hp_plan.checks.alike`).
    With one copy all computations are of its own samples.
"""

from __future__ import annotations

from hp_plan.plan import ParallelPlan


class Rotation:
    """The copies of a plan's mesh, and what each computes.

    Example:
        >>> rotation = Rotation(ParallelPlan.from_dict({"mesh": {"dp_shard": 3, "tp": 2}}))
        >>> rotation.copies, rotation.place(5, 1), rotation.counterpart(5, 1)
        (((0, 1), (2, 3), (4, 5)), 0, 1)

    Args:
        plan: with the mesh.

    Attributes:
        copies: the ranks of each, in an order that is the same in all.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        mesh = plan.mesh
        inner = mesh.cp * mesh.tp
        if inner % mesh.ep == 0:
            self._shift = 1
        else:  # of a mesh whose experts are on other than whole parts of the batch, whole replicas rotate
            self._shift = mesh.ep // inner if mesh.ep % inner == 0 else mesh.dp_shard
        self._parts = mesh.data_parallel
        found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        self._places: dict[int, int] = {}
        for rank in range(mesh.world_size):
            at = mesh.coordinate(rank)
            place = at.get("dp_replicate", 0) * mesh.dp_shard + at.get("dp_shard", 0)
            within = (place % self._shift, *(at.get(axis, 0) for axis in ("pp", "cp", "tp")))
            found.setdefault(place // self._shift, []).append((within, rank))
            self._places[rank] = place
        self.copies = tuple(tuple(rank for _, rank in sorted(found[number])) for number in sorted(found))

    def place(self, rank: int, number: int) -> int:
        """Return the part of the batch that a rank computes.

        Args:
            rank: which.
            number: of the computation; 0 is the step's own.
        """
        return (self._places[rank] + number * self._shift) % self._parts

    def counterpart(self, rank: int, number: int) -> int:
        """Return the rank whose work of computation 0 a rank does in another.

        Args:
            rank: which.
            number: of the other computation.
        """
        own = self._places[rank] // self._shift
        return self.copies[(own + number) % len(self.copies)][self.copies[own].index(rank)]
