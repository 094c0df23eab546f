"""Functions that see local tensors, with DTensors at their border."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor import port
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Placement
from hp_dtensor.spec import normalize

__all__ = ["apply_function", "custom_shard", "refuse_second_call"]


def refuse_second_call(module: Any) -> None:
    """What `distribute_module` asks of a module first.

    Raises:
        RuntimeError: it was called on this module before, whose inputs and outputs would be converted twice.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError(
            f"distribute_module: this {type(module).__name__} was distributed by a call before, and its inputs and"
            " outputs would be converted a second time; call it once, with all that is to be done"
        )


def apply_function(function: Any, apply: Callable[..., Any], args: Sequence[Any], tensor: type) -> Any:
    """Runs an autograd function of a user's own, a `DFunction`, on Tensors or DTensors.

    Args:
        function: the class; its ``_op_name`` names the rule.
        apply: the framework's own ``apply`` of it, which sees local tensors.
        args: its arguments.
        tensor: the framework's tensor class.

    Raises:
        ValueError: ``_op_name`` names no rule, or Tensors and DTensors are mixed.
    """
    from hp_dtensor.rules.functions import plan_function  # loads the rules: not when the package is imported

    f, convert = port.tensors(), port.gradients().convert
    tensors = [value for value in args if isinstance(value, tensor)]
    given = [value for value in tensors if isinstance(value, f.DTensor)]
    if not given:
        return apply(*args)
    if len(given) != len(tensors):
        raise ValueError(f"{function.__name__}: plain tensors and DTensors are mixed; distribute the plain ones")
    sizes = [f.local_view(value).itemsize for value in given]
    found, spec = plan_function(function._op_name, [value._spec for value in given], sizes)
    layouts = iter(zip(found.operands, found.vary, strict=True))
    local = []
    for value in args:
        if isinstance(value, f.DTensor):
            placements, vary = next(layouts)
            axes = tuple(v and p.is_replicate() for v, p in zip(vary, placements, strict=True))
            target = value._spec.with_placements(placements)
            value = f.local_of(convert(value, target, axes if any(axes) else None))
        local.append(value)
    return f.wrap(apply(*local), spec)


def custom_shard(
    fn: Callable[..., Any],
    device_mesh: DeviceMesh,
    out_placements: Any,
    in_placements: Sequence[Sequence[Placement] | None] | None = None,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """A function that runs ``fn`` on local tensors, with DTensors at its border.

    Args:
        fn: works on this rank's parts.
        device_mesh: the mesh of the results.
        out_placements: placements of the result, or a tuple of them with one entry a result; None for a plain result.
            Where a result is cut or partial, a replicated argument's gradient is a sum over the ranks.
        in_placements: placements that each positional argument must have, None for any and for what is no DTensor.
        redistribute_inputs: bring arguments to ``in_placements``; otherwise others are an error.

    Raises:
        ValueError: an argument with other placements than ``in_placements`` says.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        f, convert = port.tensors(), port.gradients().convert
        varies = _varying(out_placements)
        given = []
        for position, value in enumerate(args):
            wanted = in_placements[position] if in_placements is not None and position < len(in_placements) else None
            if isinstance(value, f.DTensor):
                if wanted is not None:
                    spec = value._spec.with_placements(
                        normalize(
                            wanted, value._spec.mesh, len(value._spec.shape), f"custom_shard: argument {position}"
                        )
                    )
                    if spec is not value._spec:
                        if not redistribute_inputs:
                            raise ValueError(
                                f"custom_shard: argument {position} is placed {value._spec.placements},"
                                f" in_placements says {spec.placements}; pass redistribute_inputs=True to move it"
                            )
                        value = f.redistribute(value, spec)
                spec = value._spec
                axes = tuple(a in varies and p.is_replicate() for a, p in enumerate(spec.placements))
                value = f.local_of(convert(value, spec, axes) if spec.mesh == device_mesh and any(axes) else value)
            given.append(value)
        out = fn(*given, **kwargs)
        several = isinstance(out, (tuple, list))
        placements = out_placements if several or _is_tuple_of_one(out_placements) else (out_placements,)
        made = [
            value if wanted is None else f.DTensor.from_local(value, device_mesh, wanted)
            for value, wanted in zip(out if several else (out,), placements, strict=True)
        ]
        return tuple(made) if several else made[0]

    return run


def _is_tuple_of_one(out_placements: Any) -> bool:
    """Whether there is one entry, which are the placements of the one result (or None)."""
    return bool(out_placements) and len(out_placements) == 1 and not isinstance(out_placements[0], Placement)


def _varying(out_placements: Any) -> set[int]:
    """The mesh axes on which a result is cut or partial."""
    several = [out_placements] if out_placements and isinstance(out_placements[0], Placement) else out_placements or ()
    return {axis for each in several for axis, p in enumerate(each or ()) if not p.is_replicate()}
