"""Options and parameters of optimizers: checks, the same for every framework, and agreement of all ranks on them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from hp_platform import get_platform
from hp_platform.extend import agree, own_rank, share_bytes

_BELOW = {
    "lr": math.inf,
    "weight_decay": math.inf,
    "eps": math.inf,
    "momentum": 1.0,
    "matched_adamw_rms": math.inf,
    "ns_epsilon": math.inf,
}
"""Hyperparameters that are numbers, at least 0 and below these."""
_MISSPELT = 0.87
"""How much of a key must be that of a hyperparameter: one letter of ten may differ, and "max_momentum" is no slip."""


def check_number(caller: str, name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Raise for a hyperparameter that is out of its range; of one that is a tensor only the shape is looked at.

    Args:
        caller: the optimizer, for the error.
        name: of the hyperparameter.
        value: it must be at least ``low`` and less than ``below``.
        low: the smallest value.
        below: the first value that is too large.

    Raises:
        ValueError: the number is out of range, or not a number; a tensor of several elements.
        TypeError: it is neither a number nor a tensor.
    """
    if isinstance(value, (int, float)):
        if not low <= value < below:
            end = f" and less than {below:g}" if below < math.inf else ""
            raise ValueError(f"{caller}: {name} must be at least {low:g}{end}, got {value!r}")
    elif not hasattr(value, "shape"):
        raise TypeError(f"{caller}: {name} must be a number, got {value!r}")
    elif math.prod(value.shape) != 1:
        raise ValueError(f"{caller}: {name} must have one element, got shape {tuple(value.shape)}")


def check_group(caller: str, group: Mapping[str, Any], number: int, *, known: Iterable[str] | None = None) -> None:
    """Raise for a group without parameters, with one twice, or with a hyperparameter that is not meant.

    Args:
        caller: the optimizer, for the error.
        group: with its hyperparameters.
        number: of the group.
        known: hyperparameters of the optimizer, of which a key of the group may be a misspelling. Others are a
            program's own. Default: keys are not looked at.

    Raises:
        ValueError: see above.
        TypeError: a hyperparameter of another type.
    """
    if not group["params"]:
        raise ValueError(f"{caller}: group {number} has no parameters; leave it out")
    seen: set[int] = set()
    for name, parameter in zip(parameter_names(group, number), group["params"]):
        if id(parameter) in seen:
            raise ValueError(f"{caller}: group {number} has parameter {name!r} twice, which would update it twice")
        seen.add(id(parameter))
    options = {} if known is None else {_plain(each): each for each in known}
    for key in group:
        if key in ("params", "param_names") or key in options.values():
            continue
        near = difflib.get_close_matches(_plain(key), options, n=1, cutoff=_MISSPELT)
        if near:
            raise ValueError(
                f"{caller}: group {number} has {key!r}, which would have no effect. Did you mean {options[near[0]]!r}?"
            )
    check_options(caller, group, number)


def check_options(caller: str, group: Mapping[str, Any], number: int, known: Iterable[str] = ()) -> None:
    """Raise for a hyperparameter of a group that is missing or out of its range.

    Args:
        caller: the optimizer, for the error.
        group: with its hyperparameters.
        number: of the group.
        known: hyperparameters that it must have.

    Raises:
        ValueError: see above.
        TypeError: a hyperparameter of another type.
    """
    missing = [name for name in known if name not in group and name != "differentiable"]  # torch's, of no group
    if missing:
        raise ValueError(
            f"{caller}: group {number} has no {missing[0]!r}. Add groups by add_param_group, which sets what they lack"
        )
    for name, below in _BELOW.items():
        if name in group:
            check_number(caller, name, group[name], below=below)
    betas = group.get("betas")
    if betas is not None:
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"{caller}: betas must be two numbers, got {betas!r}")
        for at, beta in enumerate(betas):
            check_number(caller, f"betas[{at}]", beta, below=1.0)


def check_once(caller: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for a parameter that is in groups more than once, which would update it more than once.

    Args:
        caller: the optimizer, for the error.
        groups: all of them.

    Raises:
        ValueError: see above.
    """
    seen: dict[int, int] = {}
    for number, group in enumerate(groups):
        for name, parameter in zip(parameter_names(group, number), group["params"]):
            if id(parameter) in seen:
                raise ValueError(
                    f"{caller}: parameter {name!r} of group {number} is in group {seen[id(parameter)]}, too, and would"
                    " be updated twice; take it out of one"
                )
            seen[id(parameter)] = number


def check_gradients(caller: str, gradients: int, parameters: int) -> None:
    """Raise where there is not one gradient for each parameter, which a framework passes as a list.

    Args:
        caller: the optimizer, for the error.
        gradients: how many there are.
        parameters: how many there are.

    Raises:
        ValueError: the numbers differ.
    """
    if gradients != parameters:
        raise ValueError(f"{caller}: got {gradients} gradients for {parameters} parameters")


def parameter_names(group: Mapping[str, Any], number: int) -> list[str]:
    """Return the names of a group's parameters, or which of the group they are.

    Args:
        group: a parameter group.
        number: of the group.
    """
    names: Sequence[str] = group.get("param_names") or ()
    count = len(group["params"])  # a program may have put others into the list
    return [*names[:count], *(f"params[{at}] of group {number}" for at in range(len(names), count))]


def sparse_gradient(caller: str, name: str) -> RuntimeError:
    """Return the error for a gradient that is not dense."""
    return RuntimeError(
        f"{caller}: the gradient of {name!r} is sparse, and {caller} updates every element. Make the embedding with"
        " sparse=False, or give it to torch.optim.SparseAdam"
    )


def broken_gradient(caller: str, names: Sequence[str]) -> str:
    """Return the warning for gradients that are not finite."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{caller}: the gradients of {', '.join(map(repr, names[:3]))}{more} have values that are infinite or not a"
        " number, so all ranks skipped this step: weights and states are as they were"
    )


def different_parameters(caller: str, own: str, others: Mapping[int, str]) -> ValueError:
    """Return the error for ranks whose optimizers have different parameters or hyperparameters.

    Args:
        caller: the optimizer.
        own: the first of them that differs, as this rank has it.
        others: the ranks that have another there, and what they have.
    """
    ranks = ", ".join(map(str, list(others)[:8]))
    return ValueError(
        f"{caller}: ranks have different parameters or settings, and would wait for each other or mix them up. First"
        f" difference, here: {own}; ranks {ranks} have something else there, rank {min(others)}:"
        f" {others[min(others)]}. Build the same model and the same optimizer on all ranks"
    )


def _plain(key: str) -> str:
    """Return a key as it is compared with another."""
    return str(key).lower().replace("_", "")


_KINDS: Mapping[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


def agree_on(caller: str, describe: Callable[[], list[str]], world: Sequence[int]) -> None:
    """Raise on all ranks where one of them fails, or describes something else; a small collective where none does.

    Args:
        caller: the optimizer, for the error.
        describe: returns lines; it may raise.
        world: the ranks, all of which call this.

    Raises:
        ValueError: the first line that differs.
        Exception: this rank's; or another rank's, with its class if it is a ValueError, a TypeError or a RuntimeError.
    """
    group = get_platform().groups.new_group(list(world)) if len(world) > 1 else None

    def failed(texts: Mapping[int, str], own: Exception | None) -> Exception:
        if own is not None:
            return own
        place, text = min(texts.items())
        kind, _, said = text.partition(": ")
        return _KINDS.get(kind, RuntimeError)(f"{said} (on rank {world[place]}; no rank took the step)")

    everyone = agree(
        lambda: "\n".join(describe()).encode(),
        failed,
        partial(share_bytes, group=group),
        lambda error: f"{type(error).__name__}: {error}",
    )
    if len(set(everyone)) == 1:
        return
    told = [each.decode().split("\n") for each in everyone]
    most = max(map(len, told))
    padded = [[*lines, *["no more parameters"] * (most - len(lines))] for lines in told]
    first = next(at for at in range(most) if len({lines[at] for lines in padded}) > 1)
    mine = padded[list(world).index(own_rank())][first]
    others = {rank: lines[first] for rank, lines in zip(world, padded) if lines[first] != mine}
    raise different_parameters(caller, mine, others)
