"""Checks of optimizers' options and parameters, in the same words for every framework."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "broken_gradient",
    "check_gradients",
    "check_group",
    "check_number",
    "different_parameters",
    "muon_defaults",
    "parameter_names",
    "sparse_gradient",
]


def check_number(caller: str, name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Raise for a hyperparameter that is out of its range; one that is a tensor is not looked at.

    Args:
        caller: the optimizer, for the error.
        name: of the hyperparameter.
        value: it must be at least ``low`` and less than ``below``.
        low: the smallest value.
        below: the first value that is too large.

    Raises:
        ValueError: the number is out of range, or not a number.
    """
    if isinstance(value, (int, float)) and not low <= value < below:
        end = f" and less than {below:g}" if below < math.inf else ""
        raise ValueError(f"{caller}: {name} must be at least {low:g}{end}, got {value!r}")


def check_group(caller: str, group: Mapping[str, Any], number: int) -> None:
    """Raise for a group without parameters, with one twice, or with a hyperparameter out of its range.

    Args:
        caller: the optimizer, for the error.
        group: with its hyperparameters.
        number: of the group.

    Raises:
        ValueError: see above.
    """
    if not group["params"]:
        raise ValueError(f"{caller}: group {number} has no parameters; leave it out")
    seen: set[int] = set()
    for name, parameter in zip(parameter_names(group, number), group["params"]):
        if id(parameter) in seen:
            raise ValueError(f"{caller}: group {number} has parameter {name!r} twice, which would update it twice")
        seen.add(id(parameter))
    for name in ("lr", "weight_decay"):
        check_number(caller, name, group[name])
    if "momentum" in group:
        check_number(caller, "momentum", group["momentum"], below=1.0)


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


def muon_defaults(
    lr: Any,
    weight_decay: float,
    matched_adamw_rms: float,
    momentum: float,
    nesterov: bool,
    ns_steps: int,
    ns_variant: str,
    ns_coefficients: Any,
    ns_epsilon: float,
    ns_dtype: str | None,
) -> dict[str, Any]:
    """Return the hyperparameters of a group of Muon's that sets none of its own."""
    return {
        "lr": lr,
        "weight_decay": weight_decay,
        "matched_adamw_rms": matched_adamw_rms,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_steps": ns_steps,
        "ns_variant": ns_variant,
        "ns_coefficients": ns_coefficients,
        "ns_epsilon": ns_epsilon,
        "ns_dtype": ns_dtype,
    }


def parameter_names(group: Mapping[str, Any], number: int) -> list[str]:
    """Return the names of a group's parameters, or which of the group they are.

    Args:
        group: a parameter group.
        number: of the group.
    """
    names: Sequence[str] | None = group.get("param_names")
    return list(names) if names else [f"params[{at}] of group {number}" for at in range(len(group["params"]))]


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


def different_parameters(caller: str, own: str, others: Sequence[int]) -> ValueError:
    """Return the error for ranks whose optimizers have different parameters.

    Args:
        caller: the optimizer.
        own: the first parameter that differs, as this rank has it.
        others: the ranks that have another there.
    """
    return ValueError(
        f"{caller}: ranks have different parameters or settings, and would wait for each other or mix them up. First"
        f" difference, here: {own}; ranks {', '.join(map(str, others[:8]))} have something else there. Build the"
        " same model and the same optimizer on all ranks"
    )
