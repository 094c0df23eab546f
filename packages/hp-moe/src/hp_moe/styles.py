"""Parallel styles of experts: which rank has which, and how tokens come to them."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DeviceMesh, Placement, Replicate, Shard, StridedShard
from hp_moe.layer.checks import check_capacity, check_dispatcher, check_overlap
from hp_moe.layer.experts import Description, check_module, describe
from hp_moe.layer.layer import run_over_ranks
from hp_moe.placement.placement import ExpertPlacement
from hp_moe.port import port
from hp_moe.routes.dispatch import Combine
from hp_moe.routes.routes import Axes
from hp_styles import ParallelStyle
from hp_styles.extend import applied_name, claim


class BaseExpertParallel(ParallelStyle):
    """Experts spread over ranks; a style of one's own overrides its three methods.

    The module is called with tokens ``[tokens, hidden]`` of this rank, the numbers of the experts chosen for each and
    their weights ``[tokens, choices]``, and returns ``[tokens, hidden]``: the sum over choices of weight times expert.
    It is one of transformers' modules of experts, or ``GroupedExperts``. No token is dropped without a capacity.

    An expert's gradient is the sum over its tokens on all ranks, as in one process where those losses are added.
    """

    token_dispatcher: str = "all_to_all"
    combine_tokens: Combine = "fast"
    async_combine: bool = False
    capacity: int | None = None
    chunks: int = 1
    slots: int = 0
    deterministic: bool = False

    @property
    def settings(self) -> str:
        """Write what all ranks must have in common."""
        chunks = f", chunks={self.chunks}" if self.chunks > 1 else ""
        chunks += _capacity(self) + (", deterministic=True" if self.deterministic else "")
        return f"token_dispatcher={self.token_dispatcher!r}, combine={self.combine_tokens!r}{chunks}"

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Shard the experts and run them over the ranks.

        Raises:
            NotImplementedError: ``deterministic`` on MindSpore.
            TypeError: a module that is none of experts, or is called with something else.
            ValueError: fewer experts than ranks, experts that transformers has spread over ranks already, or
                ``async_combine`` for other experts than ``GroupedExperts``.
            RuntimeError: the module has a style already.
        """
        if self.deterministic:
            port().piece_sums()  # refuses where there are none
        module._name_in_model = applied_name()
        own = describe(module)
        check_module(own, module)
        if self.async_combine and len(own.first) == 1:
            raise ValueError(
                f"{own.name}: async_combine computes the shared expert of hp_moe's MoE while results travel; these"
                " experts return to a block that computes its own before or after them. Use chunks=2, or"
                " overlap_experts"
            )
        experts = self.expert_mesh(device_mesh)
        try:
            placement = ExpertPlacement.even(own.experts, 1 if experts is None else experts.size())
        except ValueError as error:
            raise ValueError(f"{own.name}: {error}") from None
        claim(module, self)
        self.partition(module, device_mesh)
        run_over_ranks(module, self, placement, experts, self.tensor_mesh(device_mesh), self.axes(device_mesh))
        return module

    def expert_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        """Return the axis that experts are spread over, if there is one."""
        return mesh

    def tensor_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        """Return the axis that the features of each expert are sharded over, if there is one."""
        return None

    def axes(self, mesh: DeviceMesh) -> Axes | None:
        """Return the two axes that tokens travel over one after the other, if they do."""
        return None

    def partition(self, module: Any, mesh: DeviceMesh) -> None:
        """Shard the parameters of the experts by expert."""
        own = describe(module)
        cut = ExpertPlacement.even(own.experts, mesh.size()).cut()
        placements: dict[str, tuple[Placement, ...]] = dict.fromkeys(own.parameters, (cut,))
        port().distribute(module, mesh, placements, self.src_data_rank)

    def dispatch(self, exchange: Any, tokens: Any, weights: Any) -> Any:
        """Bring tokens to their experts.

        Args:
            exchange: knows where each token goes; its ``dispatch`` is the style's own way.
            tokens: ``[tokens, hidden]``, this rank's.
            weights: ``[tokens, choices]``.

        Returns:
            Rows ``[rows, hidden]`` for the experts of this rank, ordered by expert.
        """
        return exchange.dispatch(tokens, weights)

    def combine(self, exchange: Any, rows: Any) -> Any:
        """Bring the experts' results back and add them up: ``[tokens, hidden]``."""
        return exchange.combine(rows)


class ExpertParallel(BaseExpertParallel):
    """Whole experts on each rank of a mesh; tokens go to them and come back.

    Args:
        token_dispatcher: ``"all_to_all"``, on a mesh of one axis. ``"all_gather"``, on one of few ranks, sends all
            tokens to all ranks. ``"deredundency"``, on a mesh of two axes, the slow one first, ``("oep", "iep")``,
            sends a token over the slow axis once for each group of ranks, which spreads it inside.
        combine: ``"fast"`` sends a token once to each rank that has any of its experts, which adds their results up:
            fewer bytes. ``"exact"`` sends it for each expert and adds up where it came from: the bits do not depend on
            the number of ranks.
        async_combine: compute a ``MoE``'s shared expert while results travel, and not while counts do.
        capacity: tokens of each rank that an expert takes; those beyond it are dropped, the last ones, and rows of
            zeros travel for what is missing: shapes are static, and the host waits for no counts. None drops none.
        chunks: parts of a rank's tokens: one's exchange is under way while another is computed. 2 is the usual.
        slots: replicas of hot experts that each rank has room for: see ``rebalance``.
        deterministic: gradients have the same bits wherever experts are, with replicas or without, and for any number
            of ranks that a step's micro-batches are spread over, consecutive ones on each: a backward pass of a rank is
            a micro-batch, as with ``fully_shard(deterministic=True)``. Wants ``combine="exact"``. Each rank's tokens
            for an expert are computed by themselves, and their gradients are kept to the end of the step.

    Raises:
        ValueError: another dispatcher or way to combine, ``"exact"`` with a dispatcher that adds up on the way or with
            chunks, ``deterministic`` without ``"exact"``, less than one chunk, a negative number of slots, a capacity
            below one or together with another of these.
        TypeError: ``async_combine`` or chunks in a style with a ``dispatch`` or ``combine`` of its own.
    """

    def __init__(
        self,
        token_dispatcher: str = "all_to_all",
        async_combine: bool = False,
        *,
        combine: Combine = "fast",
        capacity: int | None = None,
        chunks: int = 1,
        slots: int = 0,
        deterministic: bool = False,
    ) -> None:
        if deterministic and combine != "exact":
            raise ValueError(
                f"ExpertParallel: deterministic=True with combine={combine!r}, whose sums depend on where experts are;"
                " use combine='exact'"
            )
        self.deterministic = deterministic
        self.combine_tokens, self.slots = _checked(self, combine), _checked_slots(self, slots)
        check_dispatcher(token_dispatcher, combine)
        check_overlap(self, BaseExpertParallel, token_dispatcher, async_combine, combine, chunks)
        check_capacity(capacity, token_dispatcher, combine, chunks, slots)
        self.token_dispatcher, self.async_combine = token_dispatcher, async_combine
        self.capacity, self.chunks = capacity, chunks
        self.mesh_axes = 2 if token_dispatcher == "deredundency" else 1

    def expert_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh._flatten() if mesh.ndim == 2 else mesh

    def axes(self, mesh: DeviceMesh) -> Axes | None:
        return Axes.of(mesh) if mesh.ndim == 2 else None

    def partition(self, module: Any, mesh: DeviceMesh) -> None:
        super().partition(module, self.expert_mesh(mesh))

    def __repr__(self) -> str:
        """Write the constructor."""
        options = ", async_combine=True" if self.async_combine else ""
        options += f", combine={self.combine_tokens!r}" + (f", chunks={self.chunks}" if self.chunks > 1 else "")
        options += _capacity(self) + _slots(self) + (", deterministic=True" if self.deterministic else "")
        return f"ExpertParallel({self.token_dispatcher!r}{options})"


class ExpertTensorParallel(BaseExpertParallel):
    """Experts over the first axis of a mesh, the features of each over the second: ``("ep", "tp")``.

    Ranks of one place on the first axis have the same tokens. Each computes a part of every expert that is there; the
    sum over the second axis is taken where tokens came from.

    Args:
        combine: see ``ExpertParallel``.
        slots: see ``ExpertParallel``.

    Raises:
        ValueError: another way to combine, a negative number of slots.
    """

    mesh_axes = 2

    def __init__(self, *, combine: Combine = "fast", slots: int = 0) -> None:
        self.combine_tokens, self.slots = _checked(self, combine), _checked_slots(self, slots)

    def expert_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh[_names(mesh)[0]]

    def tensor_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh[_names(mesh)[1]]

    def partition(self, module: Any, mesh: DeviceMesh) -> None:
        own = describe(module)
        if own.experts % mesh.size(0):
            raise ValueError(
                f"{own.name}: {own.experts} experts with sharded features cannot be spread over {mesh.size(0)} ranks,"
                " which do not divide them; ExpertParallel spreads whole experts unevenly"
            )
        cut = features(own, mesh.size(1))
        placements = {name: (Shard(0), cut[name]) for name in own.parameters}
        port().distribute(module, mesh, placements, self.src_data_rank)

    def __repr__(self) -> str:
        """Write the constructor."""
        return f"ExpertTensorParallel(combine={self.combine_tokens!r}{_slots(self)})"


class TensorParallel(BaseExpertParallel):
    """The features of every expert over the ranks of a mesh of one axis.

    All ranks have the same tokens, and none travels; the parts of the results are added up.
    """

    def expert_mesh(self, mesh: DeviceMesh) -> None:
        return None

    def tensor_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh

    def partition(self, module: Any, mesh: DeviceMesh) -> None:
        own = describe(module)
        cut = features(own, mesh.size())
        port().distribute(module, mesh, {name: (cut[name],) for name in own.parameters}, self.src_data_rank)

    def __repr__(self) -> str:
        """Write the constructor."""
        return "TensorParallel()"


def features(own: Description, ranks: int) -> dict[str, Placement]:
    """Place the inner features of experts on so many ranks.

    Those of the first product are cut, as are those of the second that they meet; a bias of the second is on all.

    Raises:
        ValueError: features that the ranks do not divide.
    """
    if own.features % ranks:
        raise ValueError(
            f"{own.name}: experts of {own.features} inner features cannot be cut evenly over {ranks} ranks; use a"
            " number of ranks that divides them"
        )
    out, inner = (2, 1) if own.transposed else (1, 2)
    # [gate; up] one after the other: each rank has a part of both. Pairs in turns stay together.
    first: Placement = StridedShard(out, 2) if own.packed else Shard(out)
    bias: Placement = StridedShard(1, 2) if own.packed else Shard(1)
    placements = {**dict.fromkeys(own.first, first), own.second: Shard(inner)}
    if own.biased:
        placements |= {**{f"{name}_bias": bias for name in own.first}, f"{own.second}_bias": Replicate()}
    return placements


def _checked(style: BaseExpertParallel, combine: Combine) -> Combine:
    """Return the way to combine if there is such a one."""
    if combine not in ("fast", "exact"):
        raise ValueError(f"{type(style).__name__}: combine is 'fast' or 'exact', got {combine!r}")
    return combine


def _checked_slots(style: BaseExpertParallel, slots: int) -> int:
    if slots < 0:
        raise ValueError(f"{type(style).__name__}: slots is the number of replicas on a rank, 0 or more, got {slots}")
    return slots


def _capacity(style: BaseExpertParallel) -> str:
    return "" if style.capacity is None else f", capacity={style.capacity}"


def _slots(style: BaseExpertParallel) -> str:
    return f", slots={style.slots}" if style.slots else ""


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError(f"the axes of {mesh} need names, such as ('ep', 'tp')")
    return tuple(names)
