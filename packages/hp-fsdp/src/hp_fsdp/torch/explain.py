"""Memory of a sharded model by kind, predicted by a forward without kernels, and measured; for `hp_fsdp.explain`.

Note [A forward that leaves no trace]
    The model runs under torch's FakeTensorMode: tensors have shapes and no values. Its parameters are replaced by fake
    ones, unsharded, in the dtype of computation; its buffers by fake copies. Sharded modules get their former class, so
    nothing is gathered; a collective of the model's own raises. Afterwards each module's attributes and the states of
    random number generators are restored. Items that forward appends to a list or dictionary of its own remain.

Note [How exact the prediction is]
    Exact to the byte if fake kernels save the same tensors as real ones, and the model does not treat fake tensors
    differently. Known exceptions: oneDNN's LSTM saves a workspace that its fake kernel doesn't; layer norms of bfloat16
    save their statistics in float32 or not by device and autocast; transformers builds an attention mask if it sees a
    fake tensor, and so repeats the heads of keys and values.
"""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor.torch.extend import DTensor, local_view
from hp_fsdp.explanation.memory import (
    DEVICE_PEAK,
    BucketBytes,
    Event,
    MemoryPoint,
    MemoryRow,
    Overlap,
    activation_row,
    optimizer_row,
    unsharded_rows,
)
from hp_fsdp.groups.managed_params import groups_in
from hp_fsdp.torch.activations import Activations, SavedBytes, storages_of
from hp_fsdp.torch.activations import watch_activations as watch_activations
from hp_fsdp.torch.groups.bucket import Bucket
from hp_fsdp.torch.groups.parameter import has_own_setattr
from hp_fsdp.torch.module import HSDPModule
from hp_fsdp.torch.steps.context import RootGroup
from hp_fsdp.torch.steps.hooks import map_tensors
from hp_platform import get_platform


def predict_activations(model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> Activations:
    """Predict the tensors that autograd saves in one forward, without kernels, communication or changes to the model.

    See Note [A forward that leaves no trace], and `hp_fsdp.torch.activations` for what counts.

    Args:
        model: a sharded module.
        inputs: its positional arguments as a tuple, or its keyword arguments by name, as one rank gets them.

    Raises:
        TypeError: ``inputs`` is neither.
        NotImplementedError: tensor parallel parameters or inputs, compiled modules, or a collective in the forward.
        RuntimeError: forward depends on values.
    """
    args, kwargs = _arguments(inputs)
    groups = groups_in(model.modules())
    _check(model, groups)
    counted = Activations()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(_same_random_state())
        stack.enter_context(_restored(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mode)
        fake = functools.partial(_fake_input, {})
        args, kwargs = map_tensors(fake, args), map_tensors(fake, kwargs)
        there = storages_of(_swap_tensors(model, groups))
        for group in groups:
            stack.callback(_unshard_class(group))
        stack.enter_context(_Silent())
        with SavedBytes(counted, there.__contains__).hooks():
            try:
                output = model(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise RuntimeError(
                    f"explain: the forward of {type(model).__name__} cannot run without values: {error} needs them, as"
                    " .item(), nonzero or an if on a tensor do. Leave out inputs, and measure with watch_activations"
                ) from error
            except Exception as error:
                error.add_note(f"explain ran the forward of {type(model).__name__} on inputs without values")
                raise
        del output
    del args, kwargs, there, fake
    _check_nothing_kept(model, mode)
    return counted


def _check_nothing_kept(model: nn.Module, mode: FakeTensorMode) -> None:
    """Raise if tensors without values outlive the forward, in a cache that a later forward would read."""
    gc.collect()
    leaked = [each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is mode]
    if leaked:
        raise RuntimeError(
            f"explain: the forward of {type(model).__name__} put {len(leaked)} tensors into a cache, the first of shape"
            f" {tuple(leaked[0].shape)}. They have no values, and a later forward would compute with them: empty the"
            " cache (a dict of the module's own, functools.lru_cache) or build a new model. Run one forward before"
            " explain(inputs=...), so that it is filled, or leave out inputs"
        )


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise TypeError(
        "explain: expected inputs as a tuple of positional arguments or a dict of keyword arguments, got"
        f" {type(inputs).__name__}. One tensor is inputs=(tensor,)"
    )


def _check(model: nn.Module, groups: Sequence[RootGroup]) -> None:
    for group in groups:
        for parameter in group.parameters:
            if parameter.inner is not None:
                raise NotImplementedError(
                    f"explain: activations of a model with tensor parallel parameters ({parameter.name!r} of"
                    f" {group.name}) cannot be predicted. Leave out inputs, and measure with watch_activations"
                )
        if type(group.module).__bases__[0] is not HSDPModule:
            raise NotImplementedError(
                f"explain: the class of {group.name}, {type(group.module).__name__}, was changed after fully_shard, so"
                " activations cannot be predicted. Leave out inputs, and measure with watch_activations"
            )
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise NotImplementedError(
                f"explain: {name or type(model).__name__} is compiled, and saves other tensors than its Python code"
                " does, so activations cannot be predicted. Leave out inputs, and measure with watch_activations"
            )


@contextmanager
def _same_random_state() -> Iterator[None]:
    devices = get_platform().devices
    kind = devices.kind
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if kind == "cpu":
            stack.enter_context(torch.random.fork_rng(devices=[]))
        else:
            stack.enter_context(torch.random.fork_rng([devices.current_device().index], device_type=kind))
        yield


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore each module's attributes, parameters and buffers on exit."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [(m, dict(m.__dict__), [dict(m.__dict__[table]) for table in tables]) for m in model.modules()]
    own = [(m, list(m._parameters.items())) for m in model.modules() if has_own_setattr(m)]
    try:
        yield
    finally:
        for module, parameters in own:
            for name, parameter in parameters:
                setattr(module, name, parameter)
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for table, content in zip(tables, contents, strict=True):
                # The groups look into these dictionaries, so they stay the same objects.
                module.__dict__[table].clear()
                module.__dict__[table].update(content)


def _swap_tensors(model: nn.Module, groups: Sequence[RootGroup]) -> list[torch.Tensor]:
    """Register fakes in place of parameters and buffers; return them."""
    swapped: list[torch.Tensor] = []
    managed: set[tuple[int, str]] = set()
    for bucket in (bucket for group in groups for bucket in group.buckets):
        device = _real_device(bucket.device)
        for parameter in bucket.parameters:
            fake = _parameter(parameter.shape, bucket.compute_dtype, device, bool(parameter.sharded.requires_grad))
            swapped.append(fake)
            for module, name in parameter.places:
                managed.add((id(module), name))
                _register(module, name, fake)
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in list(module._parameters.items()):
            if tensor is not None and (id(module), name) not in managed:
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = _parameter(
                        tensor.shape, tensor.dtype, _real_device(tensor.device), tensor.requires_grad
                    )
                _register(module, name, fakes[id(tensor)])
        for name, tensor in list(module._buffers.items()):
            if tensor is not None:
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = torch.empty_like(tensor, device=_real_device(tensor.device))
                module._buffers[name] = fakes[id(tensor)]
    return [*swapped, *fakes.values()]


def _register(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if has_own_setattr(module):
        setattr(module, name, tensor)
    else:
        module._parameters[name] = tensor  # type: ignore[assignment]


def _parameter(shape: Any, dtype: torch.dtype, device: torch.device, trains: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device=device), requires_grad=trains)


def _real_device(device: torch.device) -> torch.device:
    """Return the device of a tensor; one on meta goes to this process's device later."""
    return get_platform().devices.current_device() if device.type == "meta" else device


def _fake_input(bases: dict[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake of an input, in a storage of the same size, shared like the input's."""
    if isinstance(tensor, DTensor):
        raise NotImplementedError(
            "explain: activations cannot be predicted from inputs that are DTensors. Leave out inputs, and measure with"
            " watch_activations"
        )
    storage = tensor.untyped_storage()
    if storage._cdata not in bases:
        bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_real_device(tensor.device))
    base = bases[storage._cdata]
    flat = base[: base.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    fake = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return fake.detach().requires_grad_(tensor.requires_grad)


def _unshard_class(group: RootGroup) -> Callable[[], None]:
    """Give a sharded module its former class, with the casts of its policy; return a function that undoes it."""
    module, policy = group.module, group.policy
    sharded = type(module)
    module.__class__ = sharded.__bases__[1]
    handles = []
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        to_param = functools.partial(_cast, policy.param_dtype)
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs: (map_tensors(to_param, args), map_tensors(to_param, kwargs)),
                prepend=True,
                with_kwargs=True,
            )
        )
    if policy.output_dtype is not None:
        to_output = functools.partial(_cast, policy.output_dtype)
        handles.append(module.register_forward_hook(lambda _, args, output: map_tensors(to_output, output)))

    def undo() -> None:
        module.__class__ = sharded
        for handle in handles:
            handle.remove()

    return undo


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor


class _Silent(TorchDispatchMode):
    """Raises where a model communicates."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything but collectives pass."""
        if "c10d" in func.namespace:
            raise NotImplementedError(
                f"explain: forward communicates ({func}), so activations cannot be predicted. Leave out inputs, and"
                " measure with watch_activations"
            )
        return func(*args, **(kwargs or {}))


def named_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return model.named_modules()


def predicted_activations(model: nn.Module, inputs: Any, activations: Any) -> Activations | None:
    return None if inputs is None else predict_activations(model, inputs)


def overlap(root: RootGroup) -> Overlap:
    return Overlap()


def stays_gathered(group: RootGroup) -> bool:
    return not group.reshard_after_backward


def bytes_of(bucket: Bucket) -> BucketBytes:
    layout, axes = bucket.layout, bucket.axes
    alone = axes.ranks == 1
    return BucketBytes(
        shard=layout.piece * bucket.dtype.itemsize,
        gathered=bucket.gathered_bytes,
        gradients=layout.total * bucket.reduce_dtype.itemsize if bucket.trains and not alone else 0,
    )


_BUFFERS = "the reductions' buffers; autograd's own, of the group that computes, come on top"


def memory_rows(
    groups: Sequence[RootGroup],
    events: Sequence[Event],
    memory: Sequence[MemoryPoint],
    optimizer: Optimizer | None,
    predicted: Activations | None,
    measured: Activations | None,
) -> list[MemoryRow]:
    buckets = [bucket for group in groups for bucket in group.buckets]
    training = [bucket for bucket in buckets if bucket.trains]
    sharded = [parameter.sharded for bucket in buckets for parameter in bucket.parameters]
    gradients = [_bytes(parameter.grad) for parameter in sharded if parameter.grad is not None]
    rows = [
        MemoryRow("parameters", sum(b.layout.piece * b.dtype.itemsize for b in buckets), sum(map(_bytes, sharded))),
        MemoryRow("gradients", sum(b.layout.piece * b.dtype.itemsize for b in training), sum(gradients) or None),
        _optimizer_row(optimizer),
        *unsharded_rows(groups, events, memory, buffers=_BUFFERS),
        activation_row(predicted, measured),
    ]
    devices = get_platform().devices
    if buckets and buckets[0].shard.device.type not in ("cpu", "meta"):
        rows.append(MemoryRow(DEVICE_PEAK, None, devices.peak_memory()))
    return rows


def _optimizer_row(optimizer: Optimizer | None) -> MemoryRow:
    """Count states; predict those of torch's Adam, AdamW and SGD."""
    predicted = measured = None
    if optimizer is not None:
        if optimizer.state:
            measured = sum(_bytes(value) for state in optimizer.state.values() for value in state.values())
        counts = [_states_each(optimizer, group) for group in optimizer.param_groups]
        if None not in counts:
            predicted = sum(
                (count or 0) * _bytes(parameter)
                for count, group in zip(counts, optimizer.param_groups, strict=True)
                for parameter in group["params"]
                if parameter.requires_grad
            )
    return optimizer_row(optimizer, predicted, measured, "Adam, AdamW and SGD")


def _states_each(optimizer: Optimizer, group: dict[str, Any]) -> int | None:
    """Return the number of states of its size that a parameter gets; None if unknown."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return 3 if group["amsgrad"] else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    return None


def _bytes(tensor: Any) -> int:
    return local_view(tensor).nbytes if isinstance(tensor, torch.Tensor) else 0
