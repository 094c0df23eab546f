"""StateDictOptions, and optimizer states as flat dictionaries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["StateDictOptions", "flatten_optimizer_state", "unflatten_optimizer_state"]


@dataclass(frozen=True, slots=True)
class StateDictOptions:
    """What a state dict holds, by the names of ``torch.distributed.checkpoint.state_dict``, whose object is taken, too.

    Args:
        full_state_dict: whole plain tensors instead of DTensors. Default False.
        cpu_offload: tensors on the host; with ``full_state_dict`` on rank 0 only, other ranks get an empty dictionary.
            Default False.
        ignore_frozen_params: leave out parameters that require no gradient; loading does not miss them. Default False.
        keep_submodule_prefixes: of no effect, as torch's without its deprecated ``submodules``. Default True.
        strict: loading needs every name, and knows every name. Default True.
        broadcast_from_rank0: loading takes rank 0's state, of whole tensors, and sends it to the others one tensor at
            a time; they pass an empty dictionary. Needs ``full_state_dict``. Default False.
        flatten_optimizer_state_dict: optimizer states as one flat dictionary, ``"state.<name>.<key>"`` and
            ``"param_groups.<name>.<key>"``, which does not depend on how parameters are grouped; loading takes both.
            Default False.
        dsd_fqn_modifiers: torch's name of a method by which modules rename their keys, refused otherwise. Default
            ``"_fqn_modifiers"``.

    Raises:
        ValueError: ``broadcast_from_rank0`` without ``full_state_dict``.
        NotImplementedError: another ``dsd_fqn_modifiers``.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"

    def __post_init__(self) -> None:
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise ValueError(
                "StateDictOptions: broadcast_from_rank0=True sends whole tensors, so full_state_dict must be True, too"
            )
        if self.dsd_fqn_modifiers != "_fqn_modifiers":
            raise NotImplementedError("options: dsd_fqn_modifiers is not supported; rename the state's keys yourself")

    @staticmethod
    def of(options: Any) -> StateDictOptions:
        """Ours of ours, of torch's, or of None (the defaults).

        Raises:
            TypeError: something else.
            NotImplementedError: torch's options with a ``dsd_fqn_modifiers`` of the user's.
        """
        if options is None:
            return StateDictOptions()
        if isinstance(options, StateDictOptions):
            return options
        names = [field.name for field in fields(StateDictOptions) if hasattr(options, field.name)]
        if not {"full_state_dict", "strict", "flatten_optimizer_state_dict"} <= set(names):
            raise TypeError(
                f"options: expected an hp_fsdp.StateDictOptions (or torch's), got {type(options).__name__}; write"
                " options=StateDictOptions(full_state_dict=True)"
            )
        return StateDictOptions(**{name: getattr(options, name) for name in names})


def flatten_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with names as one flat dictionary.

    Example:
        >>> group = {"lr": 0.1, "params": ["w"]}
        >>> flatten_optimizer_state({"state": {"w": {"step": 3}}, "param_groups": [group]})
        {'state.w.step': 3, 'param_groups.w.lr': 0.1}
    """
    flat = {f"state.{name}.{key}": value for name, inside in state["state"].items() for key, value in inside.items()}
    for group in state["param_groups"]:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def unflatten_optimizer_state(
    state: Mapping[str, Any], known: Collection[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """States and hyperparameters by parameter, of a flat dictionary or a nested one.

    Example:
        >>> unflatten_optimizer_state({"state.a.w.step": 3, "param_groups.a.w.lr": 0.1}, ["a.w"])
        ({'a.w': {'step': 3}}, {'a.w': {'lr': 0.1}})

    Args:
        state: what ``get_optimizer_state_dict`` gave.
        known: names of parameters, which tell where in a flat key the parameter's name ends.

    Raises:
        ValueError: keys that are of no such dictionary, as an optimizer's own ``state_dict()`` has them.
    """
    states: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    if "state" in state and "param_groups" in state:
        if any(not isinstance(name, str) for group in state["param_groups"] for name in group["params"]):
            raise ValueError(
                "set_optimizer_state_dict: parameters are numbered, as in optimizer.state_dict(); expected names, as"
                " get_optimizer_state_dict gives them"
            )
        states = {name: dict(inside) for name, inside in state["state"].items()}
        for group in state["param_groups"]:
            values = {key: value for key, value in group.items() if key != "params"}
            groups |= dict.fromkeys(group["params"], values)
        return states, groups
    names = frozenset(known)
    for flat, value in state.items():
        kind, _, rest = flat.partition(".")
        if kind not in ("state", "param_groups") or "." not in rest:
            raise ValueError(
                f"set_optimizer_state_dict: {flat!r} is not a key of an optimizer's state; expected 'state' and"
                " 'param_groups', or flat keys as 'state.layer.weight.exp_avg' and 'param_groups.layer.weight.lr'"
            )
        words = rest.split(".")
        end = next((n for n in range(len(words) - 1, 0, -1) if ".".join(words[:n]) in names), len(words) - 1)
        into = states if kind == "state" else groups
        into.setdefault(".".join(words[:end]), {})[".".join(words[end:])] = value
    return states, groups
