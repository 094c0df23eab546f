"""Conversion of a module's inputs and outputs: the same hooks on a torch module and on a MindSpore Cell."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import hp_dtensor
from hp_dtensor import DeviceMesh, Placement, Shard
from hp_dtensor.extend import TensorSpec, normalize
from hp_styles import port
from hp_styles.base import Widths, check_mesh, check_sized, check_widths, shapes_of_ranks
from hp_styles.context.plan import Settings
from hp_styles.context.rounds import Round, Rounds


def _is_tensor(value: Any) -> bool:
    return isinstance(value, port.modules().Tensor)


# One placement, or one for each axis of a mesh of several.
Placed = Placement | tuple[Placement, ...]


def _placements(layout: Placed, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    return normalize([layout] if isinstance(layout, Placement) else layout, mesh, ndim, "parallel style")


@functools.lru_cache(maxsize=4096)
def _spec(mesh: DeviceMesh, layout: Placed, local: tuple[int, ...], features: int | None = None) -> TensorSpec:
    """Return the spec of which a plain tensor of this shape is the local part.

    Args:
        mesh: the style's.
        layout: of the whole.
        local: the shape.
        features: of the whole, in the last dim, where that is known; parts may differ in them.

    Raises:
        ValueError: its parts are not of one size.
    """
    placements = _placements(layout, mesh, len(local))
    shape = list(local)
    for axis, placement in enumerate(placements):
        if not (placement.is_replicate() or placement.is_partial()):
            shape[placement.dim] *= mesh.shape[axis]  # type: ignore[attr-defined]
            if features is not None and placement.is_shard(len(local) - 1):
                shape[-1] = features
    spec = TensorSpec.of(mesh, placements, tuple(shape))
    if spec.local_shape != local:
        raise ValueError(
            f"parallel style: a local input of shape {local} placed {layout!r} over {mesh.size()} ranks is uneven; pass"
            " a DTensor"
        )
    return spec


@functools.lru_cache(maxsize=4096)
def _wanted(spec: TensorSpec, mesh: DeviceMesh, desired: Placed) -> TensorSpec:
    """Return the layout that a DTensor of layout ``spec`` shall have.

    Raises:
        ValueError: it is on another mesh.
    """
    if spec.mesh != mesh:
        raise ValueError(f"parallel style: the input is on {spec.mesh}, the module on {mesh}")
    return TensorSpec.of(mesh, _placements(desired, mesh, len(spec.shape)), spec.shape)


def _to_dtensor(value: Any, mesh: DeviceMesh, layout: Placed, desired: Placed, features: int | None = None) -> Any:
    """Redistribute a plain tensor (the local part of ``layout``) or a DTensor to ``desired``, once for all readers."""
    if isinstance(value, hp_dtensor.DTensor):
        target = _wanted(value._spec, mesh, desired)
        return value if value._spec is target else port.modules().redistribute_shared(value, target)
    if not _is_tensor(value):
        raise TypeError(f"parallel style: {layout!r} is for a tensor, got {type(value).__name__}")
    port.modules().refuse_foreign(value, "parallel style")
    src = _spec(mesh, layout, tuple(value.shape), features)
    return port.modules().redistribute_shared(value, _wanted(src, mesh, desired), src)


_rounds = Rounds()
_comparing: ContextVar[list[Any] | None] = ContextVar("comparing", default=None)


@contextlib.contextmanager
def comparing_in_calls_of(module: Any) -> Iterator[None]:
    """Let styles that are applied inside compare parts once per call of ``module``, where they compare any."""
    modules: list[Any] = []
    token = _comparing.set(modules)
    try:
        yield
    finally:
        _comparing.reset(token)
    if modules:
        port.modules().around_calls(module)


def note_comparing(module: Any) -> None:
    """Note that parts are compared before ``module`` runs."""
    modules = _comparing.get()
    if modules is not None:
        modules.append(module)


def current_round() -> Round:
    """Return the round of this call of the module given to `parallelize_module`; a new one outside such a call."""
    return _rounds.of(0, backward=False)


def begin_call(module: Any, *, anew: bool = False) -> None:
    """Begin a call of the module given to `parallelize_module`: plain parts are compared once in it.

    Args:
        module: the module given to `parallelize_module`.
        anew: an open call of it was ended by an error, which no hook sees.
    """
    _rounds.enter(module, anew=anew)


def end_call(module: Any) -> None:
    """End the call."""
    _rounds.leave(module)


def compare_parts(mesh: DeviceMesh, inputs: Sequence[tuple[Any, Placed | None]]) -> None:
    """Refuse plain parts of different shapes on all ranks; Note [Parts are compared].

    Note [Parts are compared]
        A plain tensor counts as this rank's part, and parts are equally long. A rank whose part alone is longer would
        communicate other sizes than the others do, so all have to ask, at every step, whether or not its own shape is
        new to it. Lengths come from the data, so it is enough to ask once per call of the module given to
        `parallelize_module`, at the first batch or sequence that is sharded; features (the last dim) are the model's
        own. Outside of such a call every input is asked about.

    Args:
        mesh: the style's.
        inputs: values and their layouts, as many on every rank.

    Raises:
        ValueError: the ranks' parts are of different shapes.
    """
    if mesh.size() == 1 or not any(_is_part(value, layout) for value, layout in inputs):
        return
    settled = current_round().settled
    if mesh in settled:
        return
    parts = [value if _is_tensor(value) and not isinstance(value, hp_dtensor.DTensor) else None for value, _ in inputs]
    shapes = shapes_of_ranks(parts, mesh)
    if shapes is None:
        return
    settled[mesh] = shapes
    for index, (_, layout) in enumerate(inputs):
        if layout is not None and len({row[index] for row in shapes}) > 1:
            ranks = mesh.ranks.reshape(-1).tolist()
            each = "; ".join(f"rank {rank}: {list(row[index])}" for rank, row in zip(ranks, shapes, strict=True))
            raise ValueError(
                f"parallel style: the ranks' parts of an input placed {layout!r} over {mesh.size()} ranks have"
                f" different shapes: {each}. Plain tensors are taken as parts of equal length: pad them, or"
                " pass a DTensor (DTensor.from_local with shape=, or distribute_tensor)"
            )


def _is_part(value: Any, layout: Placed | None) -> bool:
    """Return True if a value is plain and its batch or sequence is sharded."""
    if layout is None or not _is_tensor(value) or isinstance(value, hp_dtensor.DTensor):
        return False
    last = len(value.shape) - 1
    return any(isinstance(p, Shard) and p.dim not in (-1, last) for p in _each(layout))


def _cuts(module: Any, layouts: Iterable[Placed | None]) -> bool:
    """Return True, and note it, if one of the layouts may shard a batch or a sequence."""
    placements = [placement for layout in layouts if layout is not None for placement in _each(layout)]
    cuts = any(isinstance(p, Shard) and p.dim != -1 for p in placements)
    if cuts:
        note_comparing(module)
    return cuts


def _each(layout: Placed) -> tuple[Placement, ...]:
    return (layout,) if isinstance(layout, Placement) else layout


def _convert_once(module: Any, mesh: DeviceMesh, kind: str, names: Iterable[Any]) -> None:
    """Note which inputs or outputs of a module a hook converts.

    Raises:
        RuntimeError: one of them is converted already, so that its parts would be taken for parts of parts.
    """
    names = set(names)
    taken = {key: set(value) for key, value in getattr(module, "_converted", {}).items()}
    before = taken.setdefault((kind, mesh._key), set())
    if names & before:
        raise RuntimeError(
            f"{type(module).__name__}: a style already converts its {kind}s {sorted(map(repr, names & before))} over"
            f" {mesh.mesh_dim_names or mesh.shape}, which can be done only once; apply PrepareModuleInput and"
            " PrepareModuleOutput to a module once"
        )
    before |= names
    module._converted = taken


def on_input(
    module: Any,
    mesh: DeviceMesh,
    layout: Placed,
    desired: Placed,
    features: int | None = None,
    sized: tuple[int, int] | None = None,
    stays: Callable[[Any], bool] | None = None,
) -> None:
    """Convert the first positional input or, if there is none, the first keyword tensor.

    Args:
        module: the module.
        mesh: the style's.
        layout: of a plain input.
        desired: the input's layout afterwards.
        features: of the whole input, where they are those of a weight.
        sized: a dim of the whole input, and the size that the module takes there; None where any will do.
        stays: tells of an input whether the module takes it as `layout`, and moves it itself; None: never.

    Raises:
        TypeError: (in forward) there is no such input, or it is not a tensor.
        ValueError: (in forward) parts that are none of ``features``, or whole where they are sharded.
    """
    check_mesh(mesh, "parallel style")
    cuts, widths = _cuts(module, [layout]), Widths(mesh, layout, features)

    def converted(mod: Any, value: Any) -> Any:
        if sized is not None and not isinstance(value, hp_dtensor.DTensor):
            check_sized(sized, mod, value, _placements(layout, mesh, len(value.shape)), mesh)
        if cuts:
            compare_parts(mesh, ((value, layout),))
        check_widths(widths, mod, value)
        return _to_dtensor(value, mesh, layout, layout if stays is not None and stays(value) else desired, features)

    def convert(mod: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and _is_tensor(args[0]):
            return (converted(mod, args[0]), *args[1:]), kwargs
        for name, value in kwargs.items():
            if _is_tensor(value):
                return args, {**kwargs, name: converted(mod, value)}
        types = [type(value).__name__ for value in (*args, *kwargs.values())]
        raise TypeError(f"parallel style on {type(mod).__name__}: the first input must be a tensor, got inputs {types}")

    module.register_forward_pre_hook(hook(convert), with_kwargs=True)


def _output(value: Any, mesh: DeviceMesh, desired: Placed, local: bool) -> Any:
    if isinstance(value, hp_dtensor.DTensor):
        target = _wanted(value._spec, mesh, desired)
        value = value if value._spec is target else port.modules().redistribute(value, target)
        return value.to_local() if local else value
    return value


def on_output(module: Any, mesh: DeviceMesh, desired: Placed, local: bool) -> None:
    """Redistribute the output, a tensor, to ``desired``."""
    check_mesh(mesh, "parallel style")
    module.register_forward_hook(hook(lambda mod, args, output: _output(output, mesh, desired, local)))


def on_inputs(
    module: Any,
    mesh: DeviceMesh,
    layouts: Sequence[Placement | None] | None,
    desired: Sequence[Placement | None] | None,
    kwarg_layouts: Mapping[str, Placement | None],
    desired_kwargs: Mapping[str, Placement | None],
    local: bool,
) -> None:
    """Convert positional and keyword inputs by their layouts."""
    check_mesh(mesh, "parallel style")
    placed = [index for index, layout in enumerate(layouts or ()) if layout is not None]
    _convert_once(module, mesh, "input", [*placed, *kwarg_layouts])

    def one(value: Any, layout: Placement | None, want: Placement | None) -> Any:
        if layout is None or value is None:
            return value
        if want is None and isinstance(value, hp_dtensor.DTensor):
            return value.to_local() if local else value
        converted = _to_dtensor(value, mesh, layout, want if want is not None else layout)
        return converted.to_local() if local and isinstance(converted, hp_dtensor.DTensor) else converted

    cuts = _cuts(module, [*(layouts or ()), *kwarg_layouts.values()])

    def convert(mod: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if layouts is not None and desired is not None:
            if len(args) != len(layouts):
                raise ValueError(
                    f"PrepareModuleInput on {type(mod).__name__}: {len(args)} positional inputs, {len(layouts)}"
                    " input_layouts"
                )
        if cuts:
            named = [(kwargs.get(name), layout) for name, layout in kwarg_layouts.items()]
            compare_parts(mesh, (*zip(args, layouts or (), strict=False), *named))
        if layouts is not None and desired is not None:
            args = tuple(one(*each) for each in zip(args, layouts, desired, strict=True))
        return args, {k: one(v, kwarg_layouts.get(k), desired_kwargs.get(k)) for k, v in kwargs.items()}

    module.register_forward_pre_hook(hook(convert), with_kwargs=True)


def on_outputs(
    module: Any,
    mesh: DeviceMesh,
    layouts: Sequence[Placement | None],
    desired: Sequence[Placement | None],
    local: bool,
) -> None:
    """Convert outputs by their layouts."""
    check_mesh(mesh, "parallel style")
    _convert_once(module, mesh, "output", [index for index, layout in enumerate(layouts) if layout is not None])
    cuts = _cuts(module, layouts)

    def convert(mod: Any, args: Any, output: Any) -> Any:
        values = output if isinstance(output, (tuple, list)) else (output,)
        if len(values) != len(layouts):
            raise ValueError(
                f"PrepareModuleOutput on {type(mod).__name__}: {len(values)} outputs, {len(layouts)} output_layouts"
            )
        if cuts:
            compare_parts(mesh, tuple(zip(values, layouts, strict=True)))
        converted = []
        for value, layout, want in zip(values, layouts, desired, strict=True):
            if layout is not None and value is not None:
                value = _output(_to_dtensor(value, mesh, layout, want or layout), mesh, want or layout, local)
            converted.append(value)
        if not isinstance(output, (tuple, list)):
            return converted[0]
        return type(output)(*converted) if hasattr(output, "_fields") else type(output)(converted)

    module.register_forward_hook(hook(convert))


class NotPickled:
    """A callable of one process and its meshes: it can be copied with its module, but not pickled.

    Args:
        function: the function that ``call`` calls.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NotPickled:
        return self

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(
            "a module with parallel styles cannot be pickled, nor saved with torch.save: its hooks belong to this"
            " process and its mesh. Save module.state_dict(), each rank its own or {name: x.full_tensor()} of all, and"
            " load it into a module that is built and parallelized again; copy.deepcopy(module) copies it"
        )


def hook(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a hook of a style: the function as a method, which every framework takes for a hook."""
    return NotPickled(function).call


def find_input(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings, which: int
) -> tuple[int | str, Any]:
    """Find one of q, k and v: its place and its value.

    Raises:
        TypeError: it is not there, or no tensor.
    """
    index = settings.qkv_indices[which] if settings.qkv_indices else None
    name = settings.qkv_kwarg_names[which] if settings.qkv_kwarg_names else None
    where = index if index is not None and index < len(args) else name
    value = kwargs.get(name) if where is name else args[index]  # type: ignore[arg-type, index]
    if where is None or not isinstance(value, port.modules().Tensor):
        raise TypeError(
            f"ContextParallel on {type(module).__name__}: {'qkv'[which]} is looked for at position {index} and by name"
            f" {name!r}; the inputs are {[type(x).__name__ for x in args]} and"
            f" { {key: type(x).__name__ for key, x in kwargs.items()} }"
        )
    return where, value


def with_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], places: Sequence[int | str], values: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with other values in some places."""
    positional, named = list(args), dict(kwargs)
    for place, value in zip(places, values, strict=True):
        if isinstance(place, str):
            named[place] = value
        else:
            positional[place] = value
    return tuple(positional), named


def check_output(module: Any, shape: tuple[int, ...], heads: int, length: int, head_dim: int, seq_dim: int) -> None:
    """Check that an output has the dims of the queries, or the heads flattened into ``head_dim``.

    Raises:
        ValueError: another shape.
    """
    if max(head_dim, seq_dim) >= len(shape) or shape[seq_dim] != length or shape[head_dim] % heads:
        raise ValueError(
            f"ContextParallel on {type(module).__name__}: the output of shape {shape} must have the"
            f" sequence of length {length} in dim {seq_dim} and the {heads} heads in dim {head_dim}, as the queries"
        )
