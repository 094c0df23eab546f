"""What goes into a call of a module, by name and by position, and what comes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Arguments", "mapped", "refuse_compiled"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Arguments:
    """The inputs of a module's forward, by name and by position.

    Args:
        module: the module.
        style: the name of the style, for errors.
        named: the inputs that are looked for in each call.
        handed: the name of the argument that is passed in, if any.

    Raises:
        ValueError: forward does not have them.
    """

    def __init__(self, module: nn.Module, style: str, named: Sequence[str | int], handed: str | None) -> None:
        signature = inspect.signature(module.forward)
        parameters = signature.parameters.values()
        self._where = f"{style} on {type(module).__name__}"
        self._signature = signature
        self._index = {p.name: i for i, p in enumerate(p for p in parameters if p.kind in _POSITIONAL)}
        kinds = {p.kind for p in parameters}
        names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        for name in named:
            if isinstance(name, int):
                known = 0 <= name < len(self._index) or (name >= 0 and inspect.Parameter.VAR_POSITIONAL in kinds)
            else:
                known = name in names or inspect.Parameter.VAR_KEYWORD in kinds
            if not known:
                raise ValueError(
                    f"{self._where}: forward{signature} has no input {name!r}; pass the name of one of its inputs"
                )
        if handed is not None and (handed not in names or signature.parameters[handed].kind == _POSITIONAL[0]):
            raise ValueError(
                f"{self._where}: forward{signature} has no argument {handed!r} for the positions of its queries in the"
                " full sequence, which a causal mask needs. Add one and name it with positions=, or pass"
                " positions=None if the result does not depend on them"
            )

    def find(self, name: str | int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int | str, torch.Tensor]:
        """Where an input stands in a call, and it.

        Raises:
            TypeError: it is not there, or no tensor.
        """
        place = name if name in kwargs or isinstance(name, int) else self._index.get(name, len(args))
        found = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        if not isinstance(found, torch.Tensor):
            got = "nothing" if found is None else type(found).__name__
            raise TypeError(
                f"{self._where}: the input {name!r} of forward{self._signature} has to be a tensor, got {got}; the call"
                f" has {[type(x).__name__ for x in args]} and { {key: type(x).__name__ for key, x in kwargs.items()} }"
            )
        return place, found

    def hand(self, name: str, value: torch.Tensor, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Passes an argument, in place of what the caller passes."""
        index = self._index.get(name, len(args))
        if index < len(args):
            args[index] = value
        else:
            kwargs[name] = value


def mapped(output: Any, do: Callable[[Any], Any]) -> Any:
    """What a module returns, with ``do`` of it; of each of its items, where it is a tuple or a list."""
    if not isinstance(output, (tuple, list)):
        return do(output)
    made = [do(x) for x in output]
    return type(output)(*made) if hasattr(output, "_fields") else type(output)(made)


def refuse_compiled(style: str) -> None:
    """Refuses to be traced.

    Raises:
        NotImplementedError: under torch.compile.
    """
    if torch.compiler.is_compiling():
        untraced: Any = torch.compiler.disable(_refuse)  # else Dynamo would run what raises once more, eagerly
        untraced(style)


def _refuse(style: str) -> None:
    raise NotImplementedError(
        f"{style}: modules with this style can't be compiled; leave them out of the compiled region"
        " (torch.compiler.disable)"
    )
