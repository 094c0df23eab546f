"""Where experts are and which tokens they got, as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_moe.placement import ExpertPlacement
from hp_moe.placing import layers_with_slots, summed_loads
from hp_platform import get_platform

__all__ = ["get_placement_state", "set_placement_state"]


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
