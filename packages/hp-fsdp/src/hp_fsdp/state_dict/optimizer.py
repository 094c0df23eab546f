"""Optimizer states by the names of parameters: out of optimizers and into them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hp_fsdp import port
from hp_fsdp.port import OptimizerStates
from hp_fsdp.state_dict.model import (
    StateDictOptions,
    exported,
    from_rank0,
    get_model_state_dict,
    parameter_names,
    set_model_state_dict,
)
from hp_platform import get_platform

State = dict[str, Any]


def get_optimizer_state_dict(model: Any, optimizers: Any, *, options: StateDictOptions | None = None) -> State:
    """Get the optimizers' state, by the parameters' names in the unsharded model.

    On PyTorch an optimizer that has not stepped yet gets its states first, of zeros, so that a checkpoint can be loaded
    into them; MindSpore's have them from the beginning.

    Example:
        >>> state = get_optimizer_state_dict(model, optimizer)      # AdamW, sharded
        >>> state["state"]["layer.weight"]                          # exp_avg and exp_avg_sq are DTensors as the weight
        {'step': ..., 'exp_avg': ..., 'exp_avg_sq': ...}
        >>> state["param_groups"][0]["params"]
        ['layer.weight', 'layer.bias']

    Args:
        model: the model whose parameters the optimizers have.
        optimizers: one or several; created after ``fully_shard``. On MindSpore of ``mindspore.experimental.optim``,
            ``mindspore.mint.optim`` or ``mindspore.nn``: Note [What an optimizer holds].
        options: see `StateDictOptions`. Full, states are gathered one at a time, and every rank has to call it.
            Sharded, they look into the optimizer's memory.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name]}]}``, or a flat dictionary.

    Raises:
        TypeError: an object other than an optimizer of MindSpore.
        ValueError: an optimizer has a parameter that is not the model's; on MindSpore, states of another shape than its
            parameters, as one that was created before ``fully_shard``.
    """
    options = StateDictOptions.of(options)
    adapted, names = port.optimizers().adapted(optimizers), parameter_names(model)
    keep = not (options.full_state_dict and options.cpu_offload) or get_platform().groups.rank() == 0

    result: State = {"state": {}, "param_groups": []}
    for optimizer in adapted:
        own = _first_names(optimizer, names)
        states = optimizer.states(own, full=options.full_state_dict)
        result["state"] |= {name: _export(states[name], options, keep) for name in own if name in states}
        for values, members in optimizer.groups():
            result["param_groups"].append({**_export(values, options, keep), "params": [own[at] for at in members]})
    if not keep:
        return {}
    return flatten_optimizer_state(result) if options.flatten_optimizer_state_dict else result


def _export(value: Any, options: StateDictOptions, keep: bool) -> Any:
    if isinstance(value, dict):
        return {key: _export(inside, options, keep) for key, inside in value.items()}
    return exported(value, options, keep)


def set_optimizer_state_dict(
    model: Any, optimizers: Any, optim_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> None:
    """Load the optimizers' state in place: full tensors, of which each rank takes its part, or DTensors.

    Args:
        model: the model whose parameters the optimizers have.
        optimizers: one or several; the state's parameter groups may be other ones than theirs.
        optim_state_dict: the result of `get_optimizer_state_dict`, nested or flat; full, of any number of ranks.
        options: see `StateDictOptions`.

    Raises:
        TypeError: an object other than an optimizer of MindSpore.
        ValueError: with ``strict``, parameters that the state does not know, or that no optimizer has; a tensor of
            another shape; an optimizer's parameter that is not the model's; parameters of one group that were saved
            with different hyperparameters, on MindSpore of one optimizer with different numbers of steps.
    """
    options = StateDictOptions.of(options)
    adapted, names = port.optimizers().adapted(optimizers), parameter_names(model)
    states, groups = unflatten_optimizer_state(optim_state_dict, [name for each in names.values() for name in each])
    entries: dict[Any, Any] = {(name, key): value for name, inside in states.items() for key, value in inside.items()}
    entries |= groups
    saved: set[Any] = set(entries)
    values: Iterator[tuple[Any, Any]] = iter(entries.items())
    if options.broadcast_from_rank0:
        saved, values = from_rank0(entries, port.model_states().broadcaster(model))
    matched = _matched(adapted, names, {name for name in saved if isinstance(name, str)}, options.strict)
    fresh: dict[str, State] = {name: {} for name in matched}
    hyper: dict[str, State] = {}
    for entry, value in values:
        if isinstance(entry, str):
            hyper[entry] = value
        elif entry[0] in matched:
            optimizer, number = matched[entry[0]]
            fresh[entry[0]][entry[1]] = optimizer.loaded(number, entry[0], entry[1], value)
        del value  # before the next one is sent
    for optimizer in adapted:
        own = {number: name for name, (owner, number) in matched.items() if owner is optimizer}
        shared = [_shared([own[at] for at in members if at in own], hyper) for _, members in optimizer.groups()]
        optimizer.load({number: fresh[name] for number, name in own.items()}, shared, strict=options.strict)


def _first_names(optimizer: OptimizerStates, names: Mapping[int, Sequence[str]]) -> list[str]:
    """Return the first name of each of the optimizer's parameters, in order."""
    strange = [parameter for parameter in optimizer.parameters if id(parameter) not in names]
    if strange:
        raise ValueError(
            f"optimizer state: {len(strange)} of {len(optimizer.parameters)} parameters of {optimizer.kind} are not the"
            f" model's, the first of shape {tuple(strange[0].shape)}. What replaces parameters (to_empty, an"
            " adapter) comes before the optimizer"
        )
    return [names[id(parameter)][0] for parameter in optimizer.parameters]


def _matched(
    optimizers: Sequence[OptimizerStates], names: Mapping[int, Sequence[str]], saved: Collection[str], strict: bool
) -> dict[str, tuple[OptimizerStates, int]]:
    """Return the optimizer and the number of each saved name; of a tied parameter's names, the saved one."""
    matched: dict[str, tuple[OptimizerStates, int]] = {}
    missing: list[str] = []
    for optimizer in optimizers:
        first = _first_names(optimizer, names)
        for number, parameter in enumerate(optimizer.parameters):
            name = next((name for name in names[id(parameter)] if name in saved), None)
            if name is None:
                missing.append(first[number])
            else:
                matched[name] = (optimizer, number)
    unknown = sorted(name for name in saved if name not in matched)
    if strict and (missing or unknown):
        raise ValueError(
            f"set_optimizer_state_dict: {len(missing)} parameters of the optimizers are missing in the state"
            f" ({', '.join(missing[:5])}), {len(unknown)} in it belong to no optimizer ({', '.join(unknown[:5])}). Use"
            " strict=False to load the rest"
        )
    return matched


def _shared(members: Sequence[str], hyper: Mapping[str, State]) -> State:
    """Return the hyperparameters that all members of a group were saved with."""
    for name in members[1:]:
        if not _same(hyper[members[0]], hyper[name]):
            raise ValueError(
                f"set_optimizer_state_dict: {name!r} was saved with {hyper[name]}, others of its group with"
                f" {hyper[members[0]]}. Group the parameters as they were saved"
            )
    return hyper[members[0]] if members else {}


def _same(a: State, b: State) -> bool:
    return a is b or (a.keys() == b.keys() and all(_equal(a[key] == b[key]) for key in a))


def _equal(compared: Any) -> bool:
    return bool(compared.all() if hasattr(compared, "all") else compared)


def get_state_dict(
    model: Any, optimizers: Any, *, submodules: Iterable[Any] | None = None, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Get the model's state and its optimizers': `get_model_state_dict` and `get_optimizer_state_dict`.

    Example:
        >>> states = get_state_dict(model, optimizer)
        >>> torch.distributed.checkpoint.save(dict(zip(("model", "optimizer"), states)), checkpoint_id=path)

    Args:
        model: holds sharded modules, is one, or is not sharded.
        optimizers: one or several; ``()`` for none.
        submodules: deprecated by torch, and refused.
        options: see `StateDictOptions`.

    Raises:
        NotImplementedError: ``submodules``.
    """
    options = StateDictOptions.of(options)
    if submodules:
        raise NotImplementedError(
            "get_state_dict: submodules is not supported, torch deprecates it; call get_model_state_dict(submodule), or"
            " keep the names of the full state that begin with the submodule's"
        )
    state = get_model_state_dict(model, options=options)
    return state, get_optimizer_state_dict(model, optimizers, options=options)


def set_state_dict(
    model: Any,
    optimizers: Any,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Load the result of `get_state_dict`: `set_model_state_dict`, then `set_optimizer_state_dict`.

    Args:
        model: with memory, not on the meta device.
        optimizers: one or several; ``()`` for none, whose state is not looked at.
        model_state_dict: the model's state.
        optim_state_dict: the optimizers'.
        options: see `StateDictOptions`.

    Returns:
        ``missing_keys`` and ``unexpected_keys`` of the model's.

    Raises:
        ValueError: names or shapes that do not fit.
    """
    options = StateDictOptions.of(options)
    result = set_model_state_dict(model, model_state_dict, options=options)
    if optimizers:
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return result


def flatten_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten an optimizer's state with names to one dictionary.

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
    state: Mapping[str, Any], parameter_names: Collection[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return states and hyperparameters by parameter, from a flat dictionary or a nested one.

    Example:
        >>> unflatten_optimizer_state({"state.a.w.step": 3, "param_groups.a.w.lr": 0.1}, ["a.w"])
        ({'a.w': {'step': 3}}, {'a.w': {'lr': 0.1}})

    Args:
        state: the result of ``get_optimizer_state_dict``.
        parameter_names: names of parameters, to find the end of a name in a flat key.

    Raises:
        ValueError: other keys, such as those of an optimizer's own ``state_dict()``.
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
    names = frozenset(parameter_names)
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
