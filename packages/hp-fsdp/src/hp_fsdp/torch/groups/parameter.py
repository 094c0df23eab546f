"""ManagedParameter: one parameter of a group, sharded and unsharded.

Note [Sharded along another dim]
    A rank's part of a buffer is one contiguous range. A parameter that is sharded along a dim other than the first lies
    in the buffer with that dim moved to the front, so that its slices along the dim are contiguous, and a rank has as
    many as ``Shard`` of that dim assigns to it. The sharded parameter, the unsharded one and gradients are views of the
    buffer with the dim in its place: their strides are not those of a contiguous tensor, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hp_dtensor import DeviceMesh, Replicate, distribute_tensor
from hp_dtensor.extend import TensorSpec
from hp_dtensor.torch.extend import DTensor, become, give_memory, local_view, wrap
from hp_fsdp.groups.managed_params import is_copy, mark, owner_of
from hp_fsdp.groups.parameter import GroupParameter
from hp_fsdp.options import ParameterFacts
from hp_fsdp.torch.groups.encoding import Encoding, unwrapped
from hp_platform.torch.internals import get_requires_grad, set_data, without_torch_function

_functions = (torch.Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__)
_module_setattr = nn.Module.__setattr__
_OWN_ATTRIBUTES = (
    "_spec",
    "_meets_plain",
    "_gathered_as",
    "_is_param",
    "_moved_from",
    "_shadows",
    "_hsdp_gathered",
    "_hsdp_in_blocks",
    "_hsdp_owner",
    "_outside_graphs",
)
_OUTSIDE_GRAPHS = (
    "is a parameter of fully_shard: forward computes with a gathered copy of it, and the gradient of the copy is"
    " reduced into its .grad. Call backward() without inputs and read .grad, or differentiate before fully_shard"
)
"""Reason why autograd doesn't find a sharded parameter; see ``hp_dtensor.torch.backward.engine``."""
_COUNTS = f"{torch.autograd.graph.register_multi_grad_hook.__qualname__}.<locals>.get_inner_hook."
"""What ``register_multi_grad_hook`` registers in the mode "all"."""

_MEETS_PLAIN = (
    "parameter {} is gathered by fully_shard while its module's forward runs, and was used outside of it. Call the"
    " module that was given to fully_shard; where a method of it calls parts of the module (generate), make the method"
    ' gather as forward does: hp_fsdp.register_fsdp_forward_method(module, "name of the method")'
)
"""Reason why a sharded parameter meets no plain input; see ``hp_dtensor.torch.ops.dispatching.dispatch``."""


class ManagedParameter(GroupParameter):
    """A parameter, and the two tensors registered in its places in turn.

    The sharded one is the original object, with other memory and layout: optimizers, hooks and lists that refer to it
    see its changes.

    Attributes:
        cls: its original class.
        original: the original parameter; None once it is sharded.
        front: the dim that lies first in the buffer, see Note [Sharded along another dim]; None for the own order.
        copied: it is a copy of a group's parameter.
        encoding: what is gathered instead of its elements, see Note [Encoded parameters]; None for the elements.
        trains: it requires gradients.
        sharded: the tensor of user and optimizer: a DTensor, locally a range of the rank's flat shard.
        unsharded: the tensor of forward and backward: a leaf and view of the gathered buffer.
    """

    __slots__ = ("cls", "copied", "encoding", "front", "original", "sharded", "trains", "unsharded")
    kind = "module"
    stores = ("_parameters", "_modules")

    def __init__(self, name: str, original: nn.Parameter) -> None:
        self.encoding = Encoding.of(name, original)
        check_kind(name, original, encoded=self.encoding is not None)
        if self.encoding is not None and isinstance(original, self.encoding.cls):
            original = unwrapped(original, self.encoding)
        with without_torch_function():
            shape = torch.Size(original.shape)
        super().__init__(name, original._spec if isinstance(original, DTensor) else None, shape)
        self.original: nn.Parameter | None = original
        self.cls = type(original)
        self.front: int | None = None
        self.copied = is_copy(original)
        self.trains = bool(original.requires_grad)
        self.sharded: Any = None
        self.unsharded: Any = None

    def is_sharded_copy(self) -> bool:
        return self.copied or super().is_sharded_copy()

    def lacks_values(self) -> str | None:
        meta = self.original is not None and self.original.is_meta
        return "is on the meta device. Give it values before the next forward" if meta else None

    def gather(self) -> None:
        parameter: Any = self.original
        with torch.no_grad():
            full = parameter.full_tensor()
        with without_torch_function():
            set_data(parameter, full)
        parameter.__class__ = nn.Parameter
        del parameter._spec
        self.inner, self.shape, self.cls, self.copied = None, full.shape, nn.Parameter, False

    def replicate(self, inner: DeviceMesh) -> None:
        parameter: Any = self.original
        become(parameter, distribute_tensor(parameter.detach(), inner, [Replicate()] * inner.ndim))
        self.inner = parameter._spec

    def facts(self) -> ParameterFacts:
        """Return the properties that decide how it is communicated."""
        original: Any = self.original
        nbytes = math.prod(self.global_shape) * original.dtype.itemsize
        encoded = self.encoding is not None
        return ParameterFacts(self, self.name, original, original.dtype, self.trains, self.shape, nbytes, encoded)

    def flat(self) -> torch.Tensor:
        """Return the original's elements in the buffer's order, as a plain tensor of one dim."""
        assert self.original is not None
        with torch.no_grad(), without_torch_function():
            return self.flattened(torch.Tensor.detach(self.original))

    def flattened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Flatten a tensor of the unsharded shape to the buffer's order."""
        return (tensor if self.front is None else tensor.movedim(self.front, 0)).reshape(-1)

    def part(self, flat: torch.Tensor, shards: bool = False) -> torch.Tensor:
        """View a range of a buffer as the full parameter or gradient, or as a rank's part of it.

        Args:
            flat: the range, of one dim.
            shards: the range is a rank's part; else the full parameter.
        """
        if self.front is None:
            return flat if shards else flat.view(self.shape)
        rest = [size for dim, size in enumerate(self.shape) if dim != self.front]
        return flat.view(flat.numel() // math.prod(rest), *rest).movedim(0, self.front)

    def make_sharded(self, view: torch.Tensor, spec: TensorSpec, owner: str) -> None:
        """Make the original the sharded parameter over ``view``, a part of the flat shard.

        Args:
            view: the result of `part` for the rank's range.
            spec: the sharded parameter's layout.
            owner: text for the error if another group finds this parameter as well.
        """
        parameter: Any = self.original
        self.sharded, self.original = parameter, None
        become(parameter, wrap(view.detach(), spec))
        parameter._outside_graphs = _OUTSIDE_GRAPHS
        parameter._meets_plain = _MEETS_PLAIN.format(owner)
        mark(parameter, owner)

    def renew_sharded(self, view: torch.Tensor) -> None:
        """Give the sharded parameter the memory of ``view``, on another kind of device than before (meta)."""
        give_memory(self.sharded, view)

    def take_over(self, registered: Any, view: torch.Tensor, owner: str) -> None:
        """Make what is registered in the parameter's places the sharded parameter, with its values in ``view``.

        Args:
            registered: the former sharded parameter, or another object of its layout.
            view: see `make_sharded`.
            owner: likewise.
        """
        view.copy_(registered)
        if registered is not self.sharded:
            mark(registered, owner_of(self.sharded) or owner)
            self.sharded = registered
            if self.unsharded is not None:
                self.direct_hooks()
        set_data(registered, view.detach())
        self.trains = get_requires_grad(registered)

    def make_unsharded(self, view: torch.Tensor) -> None:
        """Make the unsharded parameter over ``view``, a range of the gathered buffer."""
        leaf = _leaf(self.part(view), self.inner, self.trains)
        if self.inner is None and issubclass(self.cls, nn.Parameter):
            leaf.__class__ = self.cls
        self.show_as(leaf)

    def show_as(self, leaf: Any) -> None:
        """Make a tensor of the gathered parameter's shape the unsharded parameter."""
        self.unsharded = leaf
        self.unsharded._hsdp_gathered = True
        _copy_attributes(self.sharded, self.unsharded)
        self.direct_hooks()

    def direct_hooks(self) -> None:
        """Have hooks that are set while the parameter is gathered wait for the reduced gradient."""
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            setattr(self.unsharded, name, getattr(self.sharded, name))


def lost_write(module: str, names: list[str], *, replicated: bool) -> str:
    """Describe a write to parameters of a module in forward."""
    among = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    copies = "They are gathered copies, which are freed after it, so the write would be lost"
    replicas = "Each rank has a replica, so the write is of this rank's samples alone and the replicas differ"
    return (
        f"fully_shard: forward of {module} wrote to one of its parameters ({among})."
        f" {replicas if replicated else copies}. Keep what forward writes in a buffer (register_buffer), leave"
        " the parameter out with ignored_params=[...], or write to it outside of forward. Adapters that peft adds to"
        " parameters (target_parameters) write so: add them before hp_plan.apply, which then sums beside the parameter"
    )


def check_kind(name: str, original: Any, *, encoded: bool = False) -> None:
    """Raise for a parameter that a flat buffer cannot hold.

    Args:
        name: for errors.
        original: the parameter.
        encoded: it has an all-gather extension.

    Raises:
        TypeError: it has no shape yet, or computes in ways of its own, which a view of a buffer would not.
        ValueError: it has a gradient, of another layout, or a hook that counts graph nodes.
    """
    cls = type(original)
    if is_lazy(original):
        raise TypeError(f"fully_shard: parameter {name!r} is lazy and has no shape yet. Run a forward before")
    if isinstance(original, DTensor):
        pass
    elif cls.__module__.startswith("torch.distributed.tensor"):
        raise TypeError(
            f"fully_shard: parameter {name!r} is a DTensor of torch's. Lay it out with hp_dtensor.distribute_tensor or"
            " hp_styles.parallelize_module instead, whose names are the same"
        )
    elif not encoded and not _computes_plainly(cls):
        raise TypeError(
            f"fully_shard: parameter {name!r} is a {cls.__module__}.{cls.__name__}, a tensor subclass; a flat buffer"
            " holds plain numbers, so its kernels would be lost. Leave it out with ignored_params=[...], convert the"
            " model back to plain parameters before, or give the class an all-gather extension (fsdp_pre_all_gather"
            " and fsdp_post_all_gather)"
        )
    if original.grad is not None:
        raise ValueError(
            f"fully_shard: parameter {name!r} has a gradient, of this rank's own and of the unsharded shape. Call"
            " model.zero_grad() before"
        )
    if any(getattr(hook, "__qualname__", "").startswith(_COUNTS) for hook in (original._backward_hooks or {}).values()):
        raise ValueError(
            f"fully_shard: parameter {name!r} has a hook of register_multi_grad_hook, which waits for its graph node;"
            f" it {_OUTSIDE_GRAPHS}. Register a hook on each parameter, or mode='any'"
        )


def _computes_plainly(cls: type[torch.Tensor]) -> bool:
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    dispatches = any("__torch_dispatch__" in vars(each) for each in cls.__mro__[: cls.__mro__.index(torch.Tensor)])
    return not dispatches and function in _functions


def has_own_setattr(module: nn.Module) -> bool:
    """Tell whether a module does more than to store a parameter that is set on it (RNNs do)."""
    return type(module).__setattr__ is not _module_setattr


def _leaf(view: torch.Tensor, spec: TensorSpec | None, trains: bool) -> torch.Tensor:
    # A detached view shares storage and version counter with the buffer, and is a leaf in any case.
    view = view.detach()
    if spec is None:
        return nn.Parameter(view, requires_grad=trains)
    leaf = wrap(view, spec)
    leaf._is_param = True
    with without_torch_function():
        leaf.requires_grad_(trains)
    return leaf


def _copy_attributes(source: Any, target: Any) -> None:
    """Copy the marks of a model or a user (no weight decay, an initialised flag) to another tensor."""
    for key, value in source.__dict__.items():
        if key not in _OWN_ATTRIBUTES:
            target.__dict__[key] = value


def restore(parameters: Sequence[ManagedParameter]) -> None:
    """Put the sharded parameters back in place of others of their layout, with the others' values.

    The others were made by a method of the module (``to_empty``), and an optimizer may have the former ones.
    """
    with torch.no_grad(), without_torch_function():
        for parameter in parameters:
            module, name = parameter.places[0]
            registered: Any = module._parameters.get(name)
            former = parameter.sharded
            if registered is former or getattr(registered, "_spec", None) is not former._spec:
                continue
            give_memory(former, local_view(registered))
            for module, name in parameter.places:
                module._parameters[name] = former


def find_registered(parameter: ManagedParameter, owner: str) -> Any:
    """Return the object registered in all of a parameter's places.

    Args:
        parameter: of a group.
        owner: text that names the group in errors.

    Raises:
        RuntimeError: it was removed, replaced by a tensor of another layout, or registered tensors differ.
    """
    objects = [module._parameters.get(name) for module, name in parameter.places]
    module, name = parameter.places[0]
    where = f"fully_shard: parameter {parameter.name!r} of {owner}"
    for place, each in zip(parameter.places, objects):
        if each is None:
            raise RuntimeError(
                f"{where} is no longer in {type(place[0]).__name__}: modules that move parameters (weight_norm,"
                " parametrize, pruning) must be applied before fully_shard"
            )
        if each is not objects[0]:
            raise RuntimeError(
                f"{where} was tied: {name!r} of {type(module).__name__} and {place[1]!r} of {type(place[0]).__name__}"
                " were one tensor and now are two. Tie or untie before fully_shard"
            )
        if getattr(each, "_spec", None) is not parameter.sharded._spec:
            raise RuntimeError(
                f"{where} was replaced by {type(each).__name__} that is not laid out as {parameter.sharded._spec}."
                " Change a sharded parameter in place, or load values with load_full_state_dict(model, ...)"
            )
    return objects[0]


def check_registered(
    parameters: Sequence[ManagedParameter], objects: Sequence[Any], owner: str, *, floating: bool, on_host: bool
) -> None:
    """Refuse what is registered for a bucket's parameters, if one flat buffer can't hold it.

    Args:
        parameters: of the bucket.
        objects: what is registered for each.
        owner: text that names the group in errors.
        floating: the parameters have had a dtype of floating point.
        on_host: they stay on the host.

    Raises:
        RuntimeError: some were cast or moved and some not, all were cast to integers, or moved from the host.
    """
    first, device, dtype = parameters[0], objects[0].device, objects[0].dtype
    for parameter, registered in zip(parameters, objects):
        if registered.dtype is not dtype or registered.device != device:
            raise RuntimeError(
                f"fully_shard: parameters of one group differ: {first.name!r} of {owner} is {dtype} on {device},"
                f" {parameter.name!r} is {registered.dtype} on {registered.device}. Cast and move all of a sharded"
                " module, or none"
            )
    if floating and not dtype.is_floating_point:
        raise RuntimeError(f"fully_shard: parameter {first.name!r} of {owner} was cast to {dtype}")
    if on_host and device.type not in ("cpu", "meta"):
        raise RuntimeError(
            f"fully_shard: parameter {first.name!r} of {owner} is on {device}, but with"
            " offload_policy=CPUOffloadPolicy() sharded parameters stay on the host. Materialise them there:"
            ' model.to_empty(device="cpu"); don\'t move a sharded model'
        )
