"""Change which ranks compute an expert, between steps: replicas that follow the load, and homes.

Note [Homes]
    The home of an expert has its row of each parameter. A rank's rows are those of its experts in ascending order, and
    the layout of the parameters says which they are (``RaggedShard`` with ``owners``). So ``full_tensor`` and
    checkpoints have the experts in their order wherever they are.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from hp_moe.layer.checks import check_counted_together
from hp_moe.layer.layer import ExpertLayer
from hp_moe.placement.placement import ExpertPlacement, plan_replicas
from hp_moe.port import port
from hp_platform import get_platform
from hp_platform.extend import agree, reduce_numbers, share_bytes


def rebalance(model: Any, *, keep: float = 0.05, group: Any = None) -> dict[str, ExpertPlacement]:
    """Give hot experts replicas, by the tokens that experts got since the last call; counts begin anew.

    Between steps, on all ranks, every some dozens of steps. Loads are integers summed over all ranks, so each rank
    decides alike. Homes stay: see ``place_experts``.

    Args:
        model: with modules of experts whose style has ``slots``.
        keep: see ``plan_replicas``.
        group: the ranks whose tokens count, and that call; None is all.

    Returns:
        The placement of each module of experts, by its name.

    Raises:
        ValueError: no module of experts has slots, or ranks of the group have different ones.
    """
    layers = layers_with_slots(model)
    loads = summed_loads("rebalance", model, layers, group)
    for name, layer in layers.items():
        layer.place(plan_replicas(loads[name], layer.placement, layer.style.slots, keep=keep))
        layer.load = [0] * layer.own.experts
    return {name: layer.placement for name, layer in layers.items()}


def place_experts(module: Any, placement: ExpertPlacement, *, optimizer: Any = None) -> None:
    """Place the experts of a module, between steps, on all ranks of their mesh.

    An expert with another home moves there, with its parameters, their gradients and their states in the optimizer,
    bit for bit. Each rank keeps its number of experts: Note [Homes].

    Example:
        >>> swapped = ExpertPlacement((1, 0, 0, 1), ((), (), (), ()), 2)  # were at (0, 0, 1, 1)
        >>> place_experts(layer.mlp.experts, swapped, optimizer=optimizer)

    Args:
        module: of experts, under a style.
        placement: of its experts, with replicas as far as the style has ``slots``.
        optimizer: one, or several, that have the module's parameters; needed where homes change. () is none.

    Raises:
        TypeError: a module without a style of experts.
        ValueError: a placement of another number of experts or ranks, with more replicas on a rank than it has slots,
            with other homes and no optimizer; ranks that were passed different ones.
        NotImplementedError: other homes, on MindSpore, under fully_shard, under an optimizer whose states are not
            laid out as their parameters, or of a module whose attribute ``tied_to_experts`` names tensors outside of it
            that are sharded as its experts are.
    """
    layer = getattr(module, "_expert_layer", None)
    if layer is None:
        raise TypeError(
            f"place_experts: {type(module).__name__} has no experts over ranks; apply ExpertParallel to it first"
        )
    several = isinstance(optimizer, Iterable)
    optimizers = list(optimizer) if several else [] if optimizer is None else [optimizer]
    moves = placement.home != layer.placement.home
    problem, belongings = None, []
    try:
        layer.check(placement)
        if moves:
            _check_homes(module, layer, placement, optimizer)
            axes = 1 if layer.features is None else 2
            belongings = port().belongings(module, layer.own.parameters, layer.placement.cut(), axes, optimizers)
    except (ValueError, NotImplementedError) as error:
        problem = error
    _agree(layer, (placement, belongings), problem)
    if moves:
        port().move(module, layer.own.parameters, placement.cut(), optimizers)
    layer.place(placement)


def _check_homes(module: Any, layer: ExpertLayer, placement: ExpertPlacement, optimizer: Any) -> None:
    """Refuse other homes that a layer has no memory for, or that leave something behind."""
    if (left := getattr(module, "tied_to_experts", None)) is not None:
        raise NotImplementedError(
            f"{layer.own.name}: experts get other homes, but {left} would stay; give a placement with the same homes"
        )
    before, after = ([each.home.count(rank) for rank in range(each.ranks)] for each in (layer.placement, placement))
    if before != after:
        raise ValueError(
            f"{layer.own.name}: the ranks would be home to {after} experts, but have memory for {before}; swap homes"
        )
    if optimizer is None:
        raise ValueError(
            f"{layer.own.name}: experts get other homes, and the states of their parameters have to go with them; pass"
            " optimizer=, or optimizer=() if there is none"
        )


def _agree(layer: ExpertLayer, choice: object, problem: Exception | None) -> None:
    """Raise on all ranks alike where one has a problem, or another choice."""
    own = problem or zlib.crc32(repr(choice).encode()).to_bytes(4, "little")

    def failed(texts: Mapping[int, str], error: Exception | None) -> Exception:
        rank, text = next(iter(texts.items()))
        return error or ValueError(f"{layer.own.name}: rank {rank} was passed a placement that does not fit: {text}")

    digests = agree(lambda: own, failed, functools.partial(share_bytes, group=layer.group))
    for rank, digest in enumerate(digests):
        if digest != digests[layer.rank]:
            raise ValueError(
                f"{layer.own.name}: rank {layer.rank} and rank {rank} were passed different placements, or optimizers"
                " with different states; pass the same on all ranks"
            )


def summed_loads(function: str, model: Any, layers: Mapping[str, ExpertLayer], group: Any) -> dict[str, list[int]]:
    """Add up the tokens that the experts of each layer got on all ranks.

    Args:
        function: that asks, for the error.
        model: that has the layers.
        layers: by their names.
        group: the ranks whose tokens count; None is all.

    Raises:
        ValueError: there are no layers, or ranks of the group have different ones.
    """
    sizes = {name: layer.own.experts for name, layer in layers.items()}
    purpose = "experts with slots for replicas; apply a style with some, such as ExpertParallel(slots=1)"
    check_counted_together(function, model, sizes, purpose, group)
    groups = get_platform().groups
    loads = [tokens for layer in layers.values() for tokens in layer.load]
    if groups.is_initialized():
        loads = reduce_numbers(loads, "sum", groups.default_group() if group is None else group)
    counted: dict[str, list[int]] = {}
    for name, size in sizes.items():
        counted[name], loads = loads[:size], loads[size:]
    return counted


def layers_with_slots(model: Any) -> dict[str, ExpertLayer]:
    """Return the layers of experts that have room for replicas, by their modules' names."""
    layers = {name: getattr(module, "_expert_layer", None) for name, module in port().named_modules(model)}
    return {name: layer for name, layer in layers.items() if layer is not None and layer.style.slots}


# ---- the placement in a checkpoint ----


def get_placement_state(model: Any, *, loads: bool = True, group: Any = None) -> dict[str, Any]:
    """Return which replicas experts have and which tokens they got: JSON values, the same on all ranks.

    Example:
        >>> checkpoints.save(step, model, optimizer, extra=get_placement_state(model))
        >>> set_placement_state(model, checkpoints.load(model, optimizer).extra)

    Args:
        model: with modules of experts whose style has ``slots``.
        loads: with the tokens since the last `rebalance`, which ranks add up: all of them call it together. False
            returns none, without communication.
        group: the ranks whose tokens count, and that call; None is all.

    Returns:
        By the name of each module its ``home``, ``replicas``, ``ranks`` and ``load``.

    Raises:
        ValueError: no module of experts has slots, or ranks of the group have different ones.
    """
    layers = layers_with_slots(model)
    counted = {name: [0] * layer.own.experts for name, layer in layers.items()}
    if loads:
        counted = summed_loads("get_placement_state", model, layers, group)
    return {
        name: {
            "home": list(layer.placement.home),
            "replicas": [list(each) for each in layer.placement.replicas],
            "ranks": layer.placement.ranks,
            "load": counted[name],
        }
        for name, layer in layers.items()
    }


def set_placement_state(model: Any, state: Mapping[str, Any], *, group: Any = None) -> None:
    """Give experts the replicas, and the counts of tokens, that `get_placement_state` returned.

    Homes stay as they are. Where they were others, over another number of ranks or with more slots, experts begin
    without replicas, and the next `rebalance` chooses some by the counts.

    Args:
        model: with modules of experts whose style has ``slots``.
        state: the same on all ranks.
        group: the ranks whose tokens count; None is all.

    Raises:
        ValueError: the state lacks a module, or has it with another number of experts.
    """
    layers = layers_with_slots(model)
    for name, layer in layers.items():
        saved, experts = state.get(name), layer.own.experts
        if saved is None or len(saved["load"]) != experts:
            got = "lacks it" if saved is None else f"has {len(saved['load'])} of it"
            raise ValueError(
                f"set_placement_state: {name} has {experts} experts, and the state {got}; set the state of this model"
            )
    for name, layer in layers.items():
        saved, now = state[name], layer.placement
        if (tuple(saved["home"]), saved["ranks"]) == (now.home, now.ranks):
            placement = ExpertPlacement(now.home, tuple(map(tuple, saved["replicas"])), now.ranks)
            guests = [len(computed) - now.home.count(rank) for rank, computed in enumerate(placement.local)]
            if max(guests) <= layer.style.slots:
                layer.place(placement)
        layer.load = list(saved["load"]) if _is_first(group) else [0] * layer.own.experts


def _is_first(group: Any) -> bool:
    """Tell whether this rank keeps what all have counted: the first, so that it is added up once."""
    groups = get_platform().groups
    if not groups.is_initialized():
        return True
    return groups.rank(groups.default_group() if group is None else group) == 0
