"""Model states: whole or sharded, out of a Cell and into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspore import Parameter, Tensor, nn

from hp_dtensor.mindspore.extend import local_view, wrap
from hp_fsdp.mindspore.module import group_of
from hp_fsdp.mindspore.whole import WIRE, fill, whole
from hp_fsdp.norms import spec_of
from hp_fsdp.state_dicts import load_model_state, model_state
from hp_fsdp.state_options import StateDictOptions

__all__ = [
    "exported",
    "full_state_dict",
    "get_model_state_dict",
    "load_full_state_dict",
    "parameter_names",
    "set_model_state_dict",
]


def get_model_state_dict(model: nn.Cell, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """The model's state, by the names of the unsharded Cell.

    Sharded (the default), parameters are DTensors that look into the model's memory: save or copy them before the next
    step, or take ``cpu_offload=True``, which copies. Full, they are whole plain tensors; every rank has to call it, one
    parameter is gathered at a time. Tied parameters appear under each name, as one tensor.

    Example:
        >>> state = get_model_state_dict(model)                 # sharded: each rank saves what it owns
        >>> numpy.savez(f"{path}/{rank}.npz", **{name: value.to_local().asnumpy() for name, value in state.items()})

    Args:
        model: holds sharded Cells, is one, or is not sharded.
        options: see `StateDictOptions`.
    """
    options = StateDictOptions.of(options)
    return _state(model, options, rank0_only=options.full_state_dict and options.cpu_offload)


def set_model_state_dict(
    model: nn.Cell, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> tuple[list[str], list[str]]:
    """Loads a state into the model: whole tensors, of which each rank takes its part, or DTensors.

    Example:
        >>> state = mindspore.load_checkpoint(path) if rank == 0 else {}
        >>> options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        >>> set_model_state_dict(model, state, options=options)

    Args:
        model: its parameters need no values yet (``init_empty_weights``).
        model_state_dict: by the names of the unsharded Cell. DTensors in another layout of the same ranks are moved; a
            state of another number of ranks is loaded whole.
        options: see `StateDictOptions`.

    Returns:
        The names that are missing and those that are not known, both empty where ``strict``.

    Raises:
        ValueError: with ``strict``, names that are missing or not known; a tensor of another shape.
        TypeError: what is no tensor but should be one.
    """
    own = _entries(model)
    extra = {}

    def load(name: str, value: Any) -> None:
        if isinstance(own[name], Tensor):
            fill(name, own[name], value, spec_of(own[name]))
        else:
            extra[name] = value

    found = load_model_state(own, _frozen(own), model_state_dict, StateDictOptions.of(options), load, WIRE)
    if extra:  # a Cell's extra state is no tensor, and its own to set
        model.load_state_dict(extra, strict=False)
    return found


def full_state_dict(model: nn.Cell, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Tensor]:
    """The model's state as whole plain tensors: `get_model_state_dict` with ``full_state_dict=True``.

    Args:
        model: holds sharded Cells, or is one.
        rank0_only: other ranks than the first take part and get an empty dictionary. Default False: all get the same.
        cpu: put the tensors on the host.
    """
    return _state(model, StateDictOptions(full_state_dict=True, cpu_offload=cpu), rank0_only=rank0_only)


def load_full_state_dict(model: nn.Cell, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Loads whole tensors, the same on every rank: `set_model_state_dict`. Nothing is communicated.

    Args:
        model: holds sharded Cells, or is one.
        state: what ``full_state_dict`` gave, or an unsharded Cell's ``state_dict()``; the same on every rank.
        strict: every name must be in both. Default True.

    Raises:
        ValueError: with ``strict``, names that are missing or not known; a tensor of another shape.
    """
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=strict))


def exported(value: Any, options: StateDictOptions, keep: bool) -> Any:
    """A value of a state dict as ``options`` say; what is no tensor as it is.

    Args:
        value: a DTensor is gathered where the options ask for it, so every rank has to call it.
        options: whole or not, on the host or not.
        keep: False drops the whole tensor and gives None.
    """
    if not isinstance(value, Tensor):
        return value
    if options.full_state_dict:
        made = whole(value)
        return (_on_host(made) if options.cpu_offload else made) if keep else None
    spec = spec_of(value)
    local = _on_host(value) if options.cpu_offload else local_view(value)
    return local if spec is None else wrap(local, spec)


def parameter_names(model: nn.Cell) -> dict[int, list[str]]:
    """The names of each parameter, by its id: more than one where it is tied."""
    found: dict[int, list[str]] = {}
    for name, value in _entries(model).items():
        if isinstance(value, Parameter):
            found.setdefault(id(value), []).append(name)
    return found


def _state(model: nn.Cell, options: StateDictOptions, *, rank0_only: bool) -> dict[str, Any]:
    own = _entries(model)
    return model_state(own, _frozen(own), options, exported, rank0_only=rank0_only)


def _entries(model: nn.Cell) -> dict[str, Any]:
    """What ``model.state_dict()`` holds, the very tensors, with the sharded parameters registered."""
    for _, cell in model.cells_and_names():
        group = group_of(cell)
        if group is not None:
            group.reshard()
    return dict(model.state_dict(keep_vars=True))


def _frozen(own: Mapping[str, Any]) -> list[str]:
    return [name for name, value in own.items() if isinstance(value, Parameter) and not value.requires_grad]


def _on_host(tensor: Tensor) -> Tensor:
    """A copy on the host."""
    return Tensor(local_view(tensor).asnumpy())
