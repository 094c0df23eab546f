"""State dicts of models and optimizers, whatever the framework: names, groups, what is missing, who sends what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hp_fsdp.state_options import StateDictOptions, flatten_optimizer_state, unflatten_optimizer_state
from hp_platform import get_platform

__all__ = [
    "OptimizerStates",
    "Wire",
    "from_rank0",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
]

State = dict[str, Any]
Export = Callable[[Any, StateDictOptions, bool], Any]
"""A value of a state dict as the options say; False: take part in gathering it and give None."""


def model_state(
    own: Mapping[str, Any], frozen: Collection[str], options: StateDictOptions, export: Export, *, rank0_only: bool
) -> State:
    """A model's state; what it holds under several names is exported once.

    Args:
        own: what the model holds, by its names.
        frozen: names of parameters that require no gradient.
        options: what to give.
        export: one value.
        rank0_only: other ranks take part and get an empty dictionary.
    """
    keep = not rank0_only or get_platform().groups.rank() == 0
    left_out = frozenset(frozen) if options.ignore_frozen_params else frozenset()
    made: dict[int, Any] = {}
    for name, value in own.items():
        if name not in left_out and id(value) not in made:
            made[id(value)] = export(value, options, keep)
    return {name: made[id(value)] for name, value in own.items() if name not in left_out} if keep else {}


def load_model_state(
    own: Collection[str],
    frozen: Collection[str],
    state: Mapping[str, Any],
    options: StateDictOptions,
    load: Callable[[str, Any], None],
    wire: Wire,
) -> tuple[list[str], list[str]]:
    """Loads a model's state, one value at a time.

    Args:
        own: the model's names.
        frozen: names of parameters that require no gradient.
        state: what to load.
        options: what the state is, and how strict to be.
        load: takes a name that the model has, and its value.
        wire: how rank 0 sends.

    Returns:
        The names that are missing in the state, and those that the model does not know.

    Raises:
        ValueError: there are such names, with ``strict``.
    """
    names, values = set(state), iter(state.items())
    if options.broadcast_from_rank0:
        names, values = from_rank0(dict(state), wire)
    optional = frozenset(frozen) if options.ignore_frozen_params else frozenset()
    missing = [name for name in own if name not in names and name not in optional]
    unknown = sorted(name for name in names if name not in own)
    if options.strict and (missing or unknown):
        raise ValueError(
            f"set_model_state_dict: {len(missing)} names are missing ({', '.join(missing[:5])}), {len(unknown)} are not"
            f" known ({', '.join(unknown[:5])}). Use strict=False to load the rest"
        )
    for name, value in values:
        if name in own:
            load(name, value)
        del value  # before the next one is sent
    return missing, unknown


# ---- optimizers ----
class OptimizerStates(Protocol):
    """One optimizer, as a state dict sees it. Parameters are numbered in the optimizer's order."""

    @property
    def kind(self) -> str:
        """The optimizer's class name, for errors."""
        ...

    @property
    def parameters(self) -> Sequence[Any]:
        """What it updates."""
        ...

    def states(self, names: Sequence[str], *, whole: bool) -> dict[str, State]:
        """The states by the parameters' names; on all ranks the same keys where they are to be gathered (``whole``)."""
        ...

    def groups(self) -> Iterable[tuple[State, Sequence[int]]]:
        """The parameter groups: hyperparameters, and the members' numbers."""
        ...

    def loaded(self, number: int, name: str, key: str, value: Any) -> Any:
        """Takes one state of a parameter; what it gives comes back in `load`."""
        ...

    def load(self, states: Mapping[int, State], groups: Sequence[State], *, strict: bool) -> None:
        """Ends the loading: states of the parameters that were found, hyperparameters of each group."""
        ...


def optimizer_state(
    optimizers: Iterable[OptimizerStates],
    names: Mapping[int, Sequence[str]],
    options: StateDictOptions,
    export: Export,
) -> State:
    """The optimizers' state by the parameters' names, nested or flat.

    Args:
        optimizers: one or several.
        names: of the model's parameters, by their ids; more than one where a parameter is tied.
        options: what to give.
        export: one value.

    Raises:
        ValueError: an optimizer has a parameter that is not the model's.
    """
    keep = not (options.full_state_dict and options.cpu_offload) or get_platform().groups.rank() == 0

    def exported(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: exported(inside) for key, inside in value.items()}
        return export(value, options, keep)

    result: State = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        own = _first_names(optimizer, names)
        states = optimizer.states(own, whole=options.full_state_dict)
        result["state"] |= {name: exported(states[name]) for name in own if name in states}
        for values, members in optimizer.groups():
            result["param_groups"].append({**exported(values), "params": [own[at] for at in members]})
    if not keep:
        return {}
    return flatten_optimizer_state(result) if options.flatten_optimizer_state_dict else result


def load_optimizer_state(
    optimizers: Sequence[OptimizerStates],
    names: Mapping[int, Sequence[str]],
    state: Mapping[str, Any],
    options: StateDictOptions,
    wire: Wire,
) -> None:
    """Loads optimizers' states, one value at a time; parameters may be grouped in another way than they were.

    Args:
        optimizers: one or several.
        names: of the model's parameters, by their ids.
        state: what `optimizer_state` gave, nested or flat.
        options: what the state is, and how strict to be.
        wire: how rank 0 sends.

    Raises:
        ValueError: with ``strict``, parameters that the state does not know, or that no optimizer has; parameters of
            one group that were saved with different hyperparameters; an optimizer's parameter that is not the model's.
    """
    states, groups = unflatten_optimizer_state(state, [name for each in names.values() for name in each])
    entries: dict[Any, Any] = {(name, key): value for name, inside in states.items() for key, value in inside.items()}
    entries |= groups
    known, values = set(entries), iter(entries.items())
    if options.broadcast_from_rank0:
        known, values = from_rank0(entries, wire)
    found = _matched(optimizers, names, {name for name in known if isinstance(name, str)}, options.strict)
    fresh: dict[str, State] = {name: {} for name in found}
    hyper: dict[str, State] = {}
    for entry, value in values:
        if isinstance(entry, str):
            hyper[entry] = value
        elif entry[0] in found:
            optimizer, number = found[entry[0]]
            fresh[entry[0]][entry[1]] = optimizer.loaded(number, entry[0], entry[1], value)
        del value  # before the next one is sent
    for optimizer in optimizers:
        own = {number: name for name, (owner, number) in found.items() if owner is optimizer}
        shared = [_shared([own[at] for at in members if at in own], hyper) for _, members in optimizer.groups()]
        optimizer.load({number: fresh[name] for number, name in own.items()}, shared, strict=options.strict)


def _first_names(optimizer: OptimizerStates, names: Mapping[int, Sequence[str]]) -> list[str]:
    """The first name of each of the optimizer's parameters, in their order."""
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
    """The optimizer and the number of each saved name; of a tied parameter's names, the saved one."""
    found: dict[str, tuple[OptimizerStates, int]] = {}
    missing: list[str] = []
    for optimizer in optimizers:
        first = _first_names(optimizer, names)
        for number, parameter in enumerate(optimizer.parameters):
            name = next((name for name in names[id(parameter)] if name in saved), None)
            if name is None:
                missing.append(first[number])
            else:
                found[name] = (optimizer, number)
    unknown = sorted(name for name in saved if name not in found)
    if strict and (missing or unknown):
        raise ValueError(
            f"set_optimizer_state_dict: {len(missing)} parameters of the optimizers are missing in the state"
            f" ({', '.join(missing[:5])}), {len(unknown)} in it are of no optimizer ({', '.join(unknown[:5])}). Use"
            " strict=False to load the rest"
        )
    return found


def _shared(members: Sequence[str], hyper: Mapping[str, State]) -> State:
    """The hyperparameters that all members of a group were saved with."""
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


# ---- what rank 0 sends ----
@dataclass(frozen=True, slots=True)
class Wire:
    """How rank 0 sends to all others.

    Attributes:
        is_tensor: what is sent by itself.
        tell: gives rank 0's object on every rank; others pass None.
        send: gives rank 0's tensor on every rank; others pass None, and all the shape and the dtype.
    """

    is_tensor: Callable[[Any], bool]
    tell: Callable[[Any], Any]
    send: Callable[[Any, tuple[int, ...], Any], Any]


class _Sent:
    """What rank 0 tells of a tensor before it sends it."""

    def __init__(self, tensor: Any) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def from_rank0(values: dict[Any, Any], wire: Wire) -> tuple[set[Any], Iterator[tuple[Any, Any]]]:
    """Rank 0's values on every rank; tensors are sent one at a time, as the iterator is advanced.

    Args:
        values: on rank 0, whole plain tensors and other values by name; not looked at on the others.
        wire: how they travel.

    Returns:
        The names, and an iterator of names and values, which every rank has to take to its end.

    Raises:
        TypeError: rank 0 has a DTensor; on every rank.
    """
    groups = get_platform().groups
    if not groups.is_initialized() or groups.size() == 1:
        return set(values), iter(values.items())
    first = groups.rank() == 0
    told: Any = None
    if first:
        wrong = [name for name, value in values.items() if hasattr(value, "full_tensor")]
        told = (wrong, {name: _Sent(v) if wire.is_tensor(v) else v for name, v in values.items()})
    wrong, entries = wire.tell(told)
    if wrong:
        raise TypeError(
            f"broadcast_from_rank0: rank 0 must have whole plain tensors, {len(wrong)} are DTensors: {wrong[:3]}. Load"
            " sharded states without broadcast_from_rank0"
        )
    return set(entries), _received(values if first else None, entries, wire)


def _received(values: dict[Any, Any] | None, entries: dict[Any, Any], wire: Wire) -> Iterator[Any]:
    for name, entry in entries.items():
        if isinstance(entry, _Sent):
            # Not bound to a name, so that one is gone before the next one is made.
            yield name, wire.send(None if values is None else values[name], entry.shape, entry.dtype)
        else:
            yield name, entry
