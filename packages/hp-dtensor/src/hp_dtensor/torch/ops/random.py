"""Random numbers: each rank draws what a single device would have drawn for its part.

Note [One stream for all layouts]
A random operation draws the *global* tensor from the device's default generator and keeps the local part. So the bits
are those of the single-device program for any layout, the generators of all ranks stay in step, and plain and
distributed draws interleave as they would on one device. It costs the time and, for a moment, the memory of the global
tensor. Ranks must be seeded alike (``manual_seed``); the first draw on a mesh compares their generators and raises
where they differ.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.torch.dtensor import DTensor, wrap
from hp_dtensor.torch.moves.redistribute import execute
from hp_platform import get_platform
from hp_platform.extend import reduce_numbers, when_groups_end
from hp_platform.torch.internals import plainly, without_torch_function

T = torch.Tensor
_replicate = Replicate()
_compared: set[DeviceMesh] = set()
when_groups_end(_compared.clear)


def compare_generators(mesh: DeviceMesh, device: torch.device) -> None:
    """Raise on every rank of the mesh if the ranks' generators differ; checked once per mesh."""
    if mesh in _compared or mesh.size() == 1 or mesh.get_coordinate() is None:
        return
    state = get_platform().random.get_state(device)
    low = high = [zlib.crc32(state.cpu().numpy().tobytes())]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        low, high = reduce_numbers(low, "min", group), reduce_numbers(high, "max", group)
    if low != high:
        raise RuntimeError(
            f"random numbers on {mesh}: the ranks' generators differ, so shards would not be parts of one tensor; "
            "call hp_platform.manual_seed(seed) with one seed on every rank first"
        )
    _compared.add(mesh)


def draw(spec: TensorSpec, like: torch.Tensor, fill: Any) -> torch.Tensor:
    """Return this rank's shard of a global tensor that ``fill`` fills in place, of ``like``'s dtype and device."""
    if like.is_meta:
        return torch.empty(spec.local_shape, dtype=like.dtype, device=like.device)
    compare_generators(spec.mesh, like.device)
    global_tensor = torch.empty(spec.shape, dtype=like.dtype, device=like.device)
    fill(global_tensor)
    replicated = TensorSpec.of(spec.mesh, [_replicate] * spec.mesh.ndim, spec.shape)
    return execute(global_tensor, replicated, spec)


def fill(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.normal_()``, ``torch.nn.init.normal_(x)`` and their kin."""
    x, args = (args[0], args[1:]) if args else (kwargs["tensor"], ())
    kwargs = {name: value for name, value in kwargs.items() if name != "tensor"}
    if x.is_partial():
        raise RuntimeError(
            f"{func.__name__} on a DTensor placed {x._spec.placements}: a partial value can't be drawn;"
            " reduce_partial() first"
        )
    with torch.no_grad(), without_torch_function():
        drawn = draw(x._spec, x, lambda global_tensor: func(global_tensor, *args, **kwargs))
    return _copy_into(x, drawn)


def _copy_into(x: DTensor, local: torch.Tensor) -> DTensor:
    plainly(T.copy_, (), (x, local))
    return x


def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "p", "train" if func is torch.dropout else "training", "inplace")
    bound = {
        "p": 0.5,
        "training": True,
        "train": True,
        "inplace": False,
        **dict(zip(names, args, strict=False)),
        **kwargs,
    }
    x, p = bound["input"], float(bound["p"])
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not (bound["training"] and bound["train"]) or p == 0.0:
        return x
    if x.is_partial():
        x = x.reduce_partial()
    if p == 1.0:
        dropped = x * 0.0
    else:
        with torch.no_grad(), without_torch_function():
            noise = draw(x._spec, x, lambda global_tensor: global_tensor.bernoulli_(1 - p))
            noise.div_(1 - p)
        # plain noise: checkpointing compares what is saved by its shape, and a DTensor has two
        dropped = wrap(plainly(T.mul, (), (x, noise)), x._spec)
    return x.copy_(dropped) if bound["inplace"] else dropped


def _like(func: Any, args: Any, kwargs: Any) -> Any:
    """``rand_like`` and its kin."""
    x = args[0]
    kwargs = dict(kwargs)
    requires_grad = kwargs.pop("requires_grad", False)
    template = torch.empty(0, dtype=kwargs.pop("dtype", None) or x.dtype, device=kwargs.pop("device", None) or x.device)
    kwargs.pop("memory_format", None)
    kwargs.pop("layout", None)
    spec = x._spec.with_placements([_replicate if p.is_partial() else p for p in x._spec.placements])
    name = func.__name__

    def fill_whole(global_tensor: torch.Tensor) -> None:
        if name == "rand_like":
            global_tensor.uniform_()
        elif name == "randn_like":
            global_tensor.normal_()
        else:
            bounds = [*args[1:], *(kwargs[bound] for bound in ("low", "high") if bound in kwargs)]
            global_tensor.random_(*(bounds if len(bounds) == 2 else (0, bounds[0])))

    with torch.no_grad(), without_torch_function():
        drawn = draw(spec, template, fill_whole)
    return wrap(drawn, spec).requires_grad_(requires_grad)


def special() -> dict[Any, Any]:
    """Return the handlers of the random functions, by function."""
    handlers: dict[Any, Any] = {}
    for name in "normal_ uniform_ bernoulli_ random_ exponential_ cauchy_ log_normal_ geometric_".split():
        handlers[getattr(T, name)] = fill
    for name in dir(
        torch.nn.init
    ):  # they compute with the global shape; some are intercepted, the others call the above
        if name.endswith("_") and not name.startswith("_"):
            handlers[getattr(torch.nn.init, name)] = handlers["torch.nn.init", name] = torch.no_grad()(fill)
    handlers[torch.dropout] = handlers[torch.nn.functional.dropout] = _dropout
    for like in (torch.rand_like, torch.randn_like, torch.randint_like):
        handlers[like] = _like
    return handlers
