"""Modules that compute on plain local tensors; see Note [Plain regions] in `hp_styles.tensor.regions`."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hp_dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.torch.extend import compare_generators
from hp_platform.extend import list_leaves
from hp_styles.inputs import NotPickled, hook

SUMMED_ONCE = ("down_proj_bias",)
Placements = list[Placement]


def base_layer(module: torch.nn.Module) -> torch.nn.Module:
    """Return the layer that an adapter wraps, as peft's do; the module itself if it is not an adapter.

    To styles a wrapped Linear is a Linear: the layer inside gets the style's placements, what the adapter adds is
    replicated, and inputs and outputs are converted around both.
    """
    inner = module._modules.get("base_layer")
    return module if inner is None else base_layer(inner)


def run_replicated(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Run the module's forward on full plain tensors; results are replicated DTensors."""
    whole: Placements = [Replicate()] * mesh.ndim

    def local(value: torch.Tensor) -> torch.Tensor:
        return value.redistribute(mesh, whole).to_local() if isinstance(value, DTensor) else value

    def forward(module: torch.nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if module.training:
            some = next((each for each in list_leaves((args, kwargs)) if isinstance(each, torch.Tensor)), None)
            if some is not None:
                compare_generators(mesh, some.device)
        with _plain_parameters(module, lambda name, parameter: parameter.to_local()):
            output = original(*_mapped(local, args), **_mapped(local, kwargs))
        return _mapped(lambda value: _placed(value, mesh, whole), output)

    around(module, forward)


def run_pointwise(module: torch.nn.Module) -> None:
    """Run the elementwise forward of a module of one input on this rank's part; the output has its layout."""

    def forward(module: torch.nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        (value,) = (*args, *kwargs.values())
        if not isinstance(value, DTensor):
            return original(*args, **kwargs)
        value = value.reduce_partial() if value.is_partial() else value
        output = original(value.to_local())
        if output.shape != value.to_local().shape:
            raise ValueError(
                f"{type(module).__name__} turned {tuple(value.to_local().shape)} into {tuple(output.shape)}, so"
                " it is not elementwise; give it the style 'plain'"
            )
        return DTensor.from_local(output, value.device_mesh, value.placements, shape=value.shape)

    around(module, forward)


def run_experts(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Run the forward of experts on this rank's part of the weights; the results are summed over the ranks."""
    _check_draws(module)
    experts = base_layer(module)
    whole: Placements = [Replicate()]

    def varying(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, mesh, whole)
        value = value.redistribute(mesh, whole)
        return value.to_local(grad_placements=[Partial()]) if value.is_floating_point() else value.to_local()

    def parameter(name: str, value: DTensor) -> torch.Tensor:
        if not value.placements[0].is_replicate():
            return value.to_local()
        if name.rpartition(".")[2] in SUMMED_ONCE:
            return value.redistribute(mesh, [Partial()]).to_local()
        return value.to_local(grad_placements=[Partial()])

    def forward(module: torch.nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        cut = [p.placements[0] for p in experts.parameters(recurse=False) if isinstance(p, DTensor)]
        if all(placement.is_replicate() for placement in cut):
            raise ValueError(
                f"the experts of {type(experts).__name__} are replicated, so their results would be summed"
                f" {mesh.size()} times; give their parameters styles: gate_up_proj 'packed_colwise',"
                " down_proj 'rowwise'"
            )
        args, kwargs = _mapped(varying, args), _mapped(varying, kwargs)
        with contextlib.ExitStack() as stack:
            if _by_expert(experts):
                args = stack.enter_context(_own_experts(experts, mesh, args, kwargs))
                kwargs = {}
            stack.enter_context(_plain_parameters(module, parameter))
            stack.callback(setattr, _depth, "inside", _depth.inside)
            _depth.inside += 1
            output = original(*args, **kwargs)
        total = DTensor.from_local(output, mesh, [Partial()])
        return total.redistribute(mesh, whole)

    around(module, forward)


class _Depth(threading.local):
    """Number of nested modules of experts that run on this thread."""

    inside = 0


_depth = _Depth()


def divide_inside(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Divide a plain input, one that each rank of a region has, by the number of ranks."""

    def divide(mod: torch.nn.Module, args: Any) -> Any:
        if not _depth.inside:
            raise RuntimeError(
                f"{type(mod).__name__} has the style 'moe_identity_expert' and is called outside of experts that have"
                " the style 'moe_tp_experts', which sums the ranks' results: its input would be divided by"
                f" {mesh.size()} and never summed. Give the module that contains it 'moe_tp_experts'"
            )
        return tuple(
            value / mesh.size() if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value
            for value in args
        )

    module.register_forward_pre_hook(hook(divide))


def around(module: torch.nn.Module, run: Callable[..., Any]) -> None:
    """Run ``run(module, forward, args, kwargs)`` in place of the module's forward."""

    # In place of forward: hooks of others, such as those that gather parameters, are then done. Methods, as a copy of
    # the module binds them to itself.
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return run(module, module._forward_inside, args, kwargs)

    module._forward_inside = module.forward  # type: ignore[assignment]
    module.forward = types.MethodType(forward, module)
    module._not_pickled = NotPickled()  # type: ignore[assignment]


@contextlib.contextmanager
def as_computed(module: torch.nn.Module) -> Iterator[None]:
    """Inside, a module with a style returns what its forward computes: its style's output layout is left out."""
    hooks = module._forward_hooks
    before = dict(hooks)
    for key, call in before.items():
        if isinstance(getattr(call, "__self__", None), NotPickled):
            del hooks[key]
    try:
        yield
    finally:  # in the order that they had
        added = {key: call for key, call in hooks.items() if key not in before}
        hooks.clear()
        hooks.update(before | added)


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Change the tensors of a value, in tuples, lists and dictionaries; other containers keep their content."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(change, item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_mapped(change, item) for item in value)
    if isinstance(value, dict):  # transformers' outputs: dictionaries with attributes
        for key in list(value):
            value[key] = _mapped(change, value[key])
    return value


def _placed(value: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    return value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, placements)


@contextlib.contextmanager
def _plain_parameters(module: torch.nn.Module, plain: Callable[[str, DTensor], torch.Tensor]) -> Iterator[None]:
    """Inside, the parameters and buffers of the module and of all inside it are plain."""
    restored: list[tuple[dict[str, Any], str, DTensor]] = []
    for prefix, child in module.named_modules():
        owner: Any = child  # Its tables of parameters have plain tensors in between.
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if isinstance(value, DTensor):
                    restored.append((table, name, value))
                    table[name] = plain(f"{prefix}.{name}", value)
    try:
        yield
    finally:
        for table, name, value in restored:
            table[name] = value


def _check_draws(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.modules.dropout._DropoutNd) and child.p:
            raise ValueError(
                f"the experts' {name or 'module'} drops with p = {child.p:g}: each rank would draw for its own "
                "features only; set it to 0, or leave the experts without styles"
            )


def _by_expert(module: torch.nn.Module) -> bool:
    """Return True if ranks hold whole experts: dim 0 of weights of three dims is sharded."""
    kinds = {
        placement.dim == 0
        for parameter in module.parameters(recurse=False)
        if isinstance(parameter, DTensor) and parameter.dim() == 3
        for placement in parameter.placements
        if isinstance(placement, (Shard, StridedShard))
    }
    if len(kinds) > 1:
        raise ValueError(
            f"some weights of {type(module).__name__} are sharded by expert and some by feature; give all of them"
            " 'grouped_gemm', or none"
        )
    return kinds == {True}


@contextlib.contextmanager
def _own_experts(module: torch.nn.Module, mesh: DeviceMesh, args: Any, kwargs: Any) -> Iterator[Any]:
    """Inside, the module has this rank's experts; the inputs with others' choices set to none, of weight 0."""
    count: Any = module.num_experts
    size = mesh.size()
    if count % size:
        raise ValueError(f"{type(module).__name__} has {count} experts, which {size} ranks do not divide")
    tokens, chosen, weights = [*args, *kwargs.values()]
    mine = count // size
    others = chosen // mine != mesh.get_local_rank()
    before = {name: getattr(module, name) for name in ("num_experts", "_is_expert_parallel") if hasattr(module, name)}
    module.num_experts = mine
    if "_is_expert_parallel" in before:
        module._is_expert_parallel = True  # type: ignore[assignment]
    try:
        yield tokens, torch.where(others, mine, chosen % mine), weights.masked_fill(others, 0.0)
    finally:
        for name, value in before.items():
            setattr(module, name, value)
