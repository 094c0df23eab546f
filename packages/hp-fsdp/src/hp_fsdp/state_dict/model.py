"""Model states: full or sharded, out of a model and into it, compared with its layouts and names before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from hp_dtensor import RaggedShard, Replicate
from hp_dtensor.extend import TensorSpec
from hp_fsdp.groups.managed_params import spec_of
from hp_fsdp.port import Broadcaster, ModelStates, model_states
from hp_platform import get_platform
from hp_platform.extend import reduce_numbers

Entries = list[tuple[str, Any, Any]]
"""Names, the model's tensors, and the values to load into them."""


def laid_out(own: Mapping[str, Any], state: Mapping[str, Any], *, assign: bool = False) -> dict[str, Any]:
    """Return a state whose tensors have the layouts of the model's, so that each rank can copy its part.

    Args:
        own: the model's parameters and buffers, by all of their names.
        state: DTensors in any layout, full plain tensors, or this rank's parts; entries without a counterpart stay.
        assign: the model's tensors will be replaced, and may have no memory.

    Raises:
        RuntimeError: a tensor has another shape than the model's, full or local, or the model's has no memory; on
            every rank of the mesh where tensors have to be moved between ranks.
    """
    port = model_states()
    tensors = [(name, own[name], value) for name, value in state.items() if name in own and port.is_tensor(value)]
    faults = [fault for each in tensors if (fault := _fault(*each, port, assign))]
    _stop_together(tensors, faults, port)
    if faults:
        raise RuntimeError(
            f"load_state_dict: {len(faults)} of {len(tensors)} tensors do not fit: {'; '.join(faults[:3])}"
        )
    parts: dict[tuple[int, int], Any] = {}  # tied parameters stay one tensor
    result = dict(state)
    for name, target, value in tensors:
        key = id(target), id(value)
        if key not in parts:
            parts[key] = port.laid_out_like(target, value)
        result[name] = parts[key]
    return result


def _stop_together(tensors: Entries, faults: list[str], port: ModelStates) -> None:
    """Raise if only other ranks have faults: all ranks must take part in the communication that follows, or none."""
    moved = [
        spec for _, target, value in tensors if (spec := spec_of(value)) is not None and spec is not spec_of(target)
    ]
    for mesh in dict.fromkeys(spec.mesh for spec in moved):
        some = [int(bool(faults))]
        for axis in range(mesh.ndim):
            some = reduce_numbers(some, "max", mesh.get_group(axis))
        if some[0] and not faults:
            raise RuntimeError("load_state_dict: another rank got tensors that do not fit; its error tells which")


def _fault(name: str, target: Any, value: Any, port: ModelStates, assign: bool) -> str | None:
    """Return the reason why ``value`` can't be loaded; None if it can, or if the framework checks it."""
    spec = spec_of(target)
    if spec is None and not port.takes_own_shape_only(target):
        return None
    if not (assign or port.has_memory(target)):
        return (
            f"{name!r} of the model is on the meta device. Give it memory first (model.to_empty(device=...),"
            " hp_dtensor.init_parameters(model)), or pass assign=True"
        )
    shape, full = tuple(value.shape), tuple(target.shape)
    if shape == full or (not full and shape == (1,)):  # frameworks take one element for a scalar
        return None
    if spec is None:
        return f"{name!r} has shape {shape}, the model's has {full}"
    if spec_of(value) is None and shape == spec.local_shape:
        return None
    return (
        f"{name!r} has shape {shape}, the model's has {full}, of which this rank's part, placed {spec.placements}, has"
        f" {tuple(spec.local_shape)}. A part of another number of ranks is loaded by way of a full state, or of a"
        " checkpoint, by hp_checkpoint.load or torch.distributed.checkpoint.load"
    )


def check_names(
    own: Mapping[str, Any], state: Mapping[str, Any], owner: str, *, strict: bool
) -> tuple[list[str], list[str]]:
    """Return the names that a state lacks, and those that the model does not have.

    Args:
        own: the model's entries, by name.
        state: the entries to load.
        owner: the model's class, for errors.
        strict: raise for any.

    Raises:
        RuntimeError: missing or unexpected names, with ``strict``; in the frameworks' words.
    """
    missing, unknown = [name for name in own if name not in state], [name for name in state if name not in own]
    texts = [("Missing", missing), ("Unexpected", unknown)]
    errors = [f"{text} key(s) in state_dict: {', '.join(map(repr, names))}." for text, names in texts if names]
    if strict and errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {owner}: {' '.join(errors)}")
    return missing, unknown


def ragged_axis(spec: TensorSpec | None) -> int | None:
    """Return the mesh axis over which a tensor is sharded by ranges of flattened elements, or None."""
    if spec is not None:
        for axis, placement in enumerate(spec.placements):
            if isinstance(placement, RaggedShard) and len(placement.dims) == len(spec.shape):
                return axis
    return None


def pieces_along(spec: TensorSpec, axis: int) -> tuple[TensorSpec, list[int]]:
    """Return the layout of a tensor gathered over its ragged axis, and the number of elements that each rank has."""
    placement = spec.placements[axis]
    assert isinstance(placement, RaggedShard)
    gathered = spec.with_placements([Replicate() if at == axis else p for at, p in enumerate(spec.placements)])
    numel, total = prod(gathered.local_shape), sum(placement.units)
    return gathered, [numel * unit // total if total else 0 for unit in placement.units]


class _Header:
    """Shape and dtype of a tensor, sent ahead of it."""

    def __init__(self, tensor: Any) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def from_rank0(values: dict[Any, Any], broadcaster: Broadcaster) -> tuple[set[Any], Iterator[tuple[Any, Any]]]:
    """Return rank 0's values on every rank; tensors are sent one at a time, as the iterator is advanced.

    Args:
        values: on rank 0, full plain tensors and other values by name; ignored on the others.
        broadcaster: sends them.

    Returns:
        The names, and an iterator of names and values, which every rank has to take to its end.

    Raises:
        TypeError: rank 0 has a DTensor; on every rank.
    """
    groups = get_platform().groups
    if not groups.is_initialized() or groups.size() == 1:
        return set(values), iter(values.items())
    first = groups.rank() == 0
    message: Any = None
    if first:
        wrong = [name for name, value in values.items() if hasattr(value, "full_tensor")]
        message = (wrong, {name: _Header(v) if broadcaster.is_tensor(v) else v for name, v in values.items()})
    wrong, entries = broadcaster.broadcast_object(message)
    if wrong:
        raise TypeError(
            f"broadcast_from_rank0: rank 0 must have full plain tensors, {len(wrong)} are DTensors: {wrong[:3]}. Load"
            " sharded states without broadcast_from_rank0"
        )
    return set(entries), _received(values if first else None, entries, broadcaster)


def _received(values: dict[Any, Any] | None, entries: dict[Any, Any], broadcaster: Broadcaster) -> Iterator[Any]:
    for name, entry in entries.items():
        if isinstance(entry, _Header):
            # Not bound to a name, so that one is gone before the next one is made.
            yield name, broadcaster.broadcast_tensor(None if values is None else values[name], entry.shape, entry.dtype)
        else:
            yield name, entry


State = dict[str, Any]


def get_model_state_dict(model: Any, *, options: StateDictOptions | None = None) -> State:
    """Get the model's state, by the names of the unsharded model.

    Sharded (the default), parameters are DTensors that look into the model's memory. On PyTorch
    `torch.distributed.checkpoint` saves it, and loads into it in place; on MindSpore save or copy it before the next
    step, or take ``cpu_offload=True``, which copies. Full, they are plain tensors; every rank has to call it, one
    parameter is gathered at a time. Tied parameters appear under each name, as one tensor.

    Example:
        >>> torch.distributed.checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        >>> state = get_model_state_dict(model)                 # MindSpore: each rank saves its shards
        >>> numpy.savez(f"{path}/{rank}.npz", **{name: value.to_local().asnumpy() for name, value in state.items()})

    Args:
        model: holds sharded modules, is one, or is not sharded.
        options: see `StateDictOptions`.
    """
    options = StateDictOptions.of(options)
    return _state(model, options, rank0_only=options.full_state_dict and options.cpu_offload)


def set_model_state_dict(
    model: Any, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load a state into the model in place: full tensors, of which each rank takes its part, or DTensors.

    Example:
        >>> state = torch.load(path, mmap=True) if rank == 0 else {}        # or mindspore.load_checkpoint(path)
        >>> options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        >>> set_model_state_dict(model, state, options=options)

    Args:
        model: on PyTorch with memory, not on the meta device; a Cell's parameters need no values yet
            (``init_empty_weights``).
        model_state_dict: by the names of the unsharded model. DTensors in another layout of the same ranks are moved; a
            state that another number of ranks saved is loaded by ``torch.distributed.checkpoint.load``, on MindSpore
            full.
        options: see `StateDictOptions`.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, both empty where ``strict``.

    Raises:
        ValueError: with ``strict``, names that are missing or not known; a tensor of another shape.
        TypeError: a value that should be a tensor and is not.
        RuntimeError: a parameter on the meta device.
    """
    options = StateDictOptions.of(options)
    port = model_states()
    own = port.entries(model)
    names: set[str] = set(model_state_dict)
    values: Iterator[tuple[str, Any]] = iter(model_state_dict.items())
    if options.broadcast_from_rank0:
        names, values = from_rank0(dict(model_state_dict), port.broadcaster(model))
    optional = _left_out(model, options)
    missing = [name for name in own if name not in names and name not in optional]
    unknown = sorted(name for name in names if name not in own)
    if options.strict and (missing or unknown):
        raise ValueError(
            f"set_model_state_dict: {len(missing)} names are missing ({', '.join(missing[:5])}), {len(unknown)} are"
            f" unexpected ({', '.join(unknown[:5])}). Use strict=False to load the rest"
        )
    extra: State = {}
    for name, value in values:
        if name in own and port.is_tensor(own[name]):
            port.fill(name, own[name], value)
        elif name in own:
            extra[name] = value
        del value  # before the next one is sent
    if extra:
        port.load_extra(model, extra)
    return port.incompatible_keys(missing, unknown)


def full_state_dict(model: Any, *, rank0_only: bool = False, cpu: bool = False) -> State:
    """Get the model's state as full plain tensors: `get_model_state_dict` with ``full_state_dict=True``.

    Args:
        model: holds sharded modules, or is one.
        rank0_only: other ranks than the first take part and get an empty dictionary. Default False: all get the same.
        cpu: put the tensors on the host.
    """
    return _state(model, StateDictOptions(full_state_dict=True, cpu_offload=cpu), rank0_only=rank0_only)


def load_full_state_dict(model: Any, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load full tensors, the same on every rank: `set_model_state_dict`. Nothing is communicated.

    Args:
        model: holds sharded modules, or is one.
        state: the result of ``full_state_dict``, or an unsharded model's ``state_dict()``; the same on every rank.
        strict: every name must be in both. Default True.

    Raises:
        ValueError: with ``strict``, names that are missing or not known; a tensor of another shape.
    """
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=strict))


def exported(value: Any, options: StateDictOptions, keep: bool) -> Any:
    """Convert a tensor of a state dict as ``options`` say; return other values as they are.

    Args:
        value: a DTensor is gathered if the options ask for it, so every rank has to call it.
        options: full or not, on the host or not.
        keep: False drops the full tensor and returns None.
    """
    port = model_states()
    if not port.is_tensor(value):
        return value
    if options.full_state_dict:
        full = port.full(value, on_host=options.cpu_offload and keep)
        return full if keep else None
    return port.part(value, on_host=options.cpu_offload)


def parameter_names(model: Any) -> dict[int, list[str]]:
    """List the names of each parameter, by its id: more than one where it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model_states().parameters(model):
        names.setdefault(id(parameter), []).append(name)
    return names


def _state(model: Any, options: StateDictOptions, *, rank0_only: bool) -> State:
    """Export each object of the model once, even if it has several names."""
    keep = not rank0_only or get_platform().groups.rank() == 0
    entries, left_out = model_states().entries(model), _left_out(model, options)
    own = {name: value for name, value in entries.items() if name not in left_out}
    by_id = {id(value): exported(value, options, keep) for value in {id(each): each for each in own.values()}.values()}
    return {name: by_id[id(value)] for name, value in own.items()} if keep else {}


def _left_out(model: Any, options: StateDictOptions) -> set[str]:
    if not options.ignore_frozen_params:
        return set()
    return {name for name, parameter in model_states().parameters(model) if not parameter.requires_grad}


@dataclass(frozen=True, slots=True)
class StateDictOptions:
    """Options of state dicts, by the names of ``torch.distributed.checkpoint.state_dict``'s, which are accepted too.

    Args:
        full_state_dict: full plain tensors instead of DTensors. Default False.
        cpu_offload: tensors on the host; with ``full_state_dict`` on rank 0 only, other ranks get an empty dictionary.
            Default False.
        ignore_frozen_params: leave out parameters that require no gradient; loading does not miss them. Default False.
        keep_submodule_prefixes: of no effect, as torch's without its deprecated ``submodules``. Default True.
        strict: loading needs every name, and knows every name. Default True.
        broadcast_from_rank0: loading takes rank 0's state, of full tensors, and sends it to the others one tensor at
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
                "StateDictOptions: broadcast_from_rank0=True sends full tensors; set full_state_dict=True as well"
            )
        if self.dsd_fqn_modifiers != "_fqn_modifiers":
            raise NotImplementedError("options: dsd_fqn_modifiers is not supported; rename the state's keys yourself")

    @staticmethod
    def of(options: Any) -> StateDictOptions:
        """Convert torch's options, or None (the defaults), to ours; return ours as they are.

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
