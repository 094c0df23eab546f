"""Sharded parameters that were changed from outside go back into their bucket's flat shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hp_dtensor.torch.extend import give_memory, local_view
from hp_fsdp import finding
from hp_fsdp.torch.parameter import ManagedParameter

if TYPE_CHECKING:
    from hp_fsdp.torch.bucket import Bucket

__all__ = ["adopt", "restore"]

_plain = torch._C.DisableTorchFunctionSubclass
_get_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def adopt(bucket: Bucket) -> None:
    """Takes over parameters that were materialised, moved, cast, or loaded by assignment.

    Those of a cast keep their places in the buffer, which is aligned for the dtype that it had.

    Args:
        bucket: it gets a new shard, and is prepared anew.

    Raises:
        RuntimeError: a parameter was replaced by something of another layout, or removed; some were cast and some not;
            they left the host that ``CPUOffloadPolicy`` keeps them on.
    """
    with torch.no_grad(), _plain():
        found = [_registered(bucket, parameter) for parameter in bucket.parameters]
        device, dtype = found[0].device, found[0].dtype
        _check(bucket, found)
        if device.type == "meta":
            return
        if bucket.prepared or dtype is not bucket.dtype:
            former, bucket.dtype, bucket.prepared = bucket.shard, dtype, False
            bucket.choose_dtypes()
            bucket.shard = bucket.new_shard(device)
            if former.device.type != "meta":
                bucket.shard.copy_(former)
        else:
            bucket.shard = bucket.new_shard(device)
        for index, (parameter, registered) in enumerate(zip(bucket.parameters, found)):
            view = bucket.shard_view(index)
            view.copy_(registered)
            if registered is not parameter.sharded:
                finding.mark(registered, finding.owner_of(parameter.sharded) or bucket.owner)
                parameter.sharded = registered
            _set_data(registered, view.detach())
            parameter.trains = _get_requires_grad(registered)
    bucket.note_sharded()
    bucket.show_sharded()


def restore(bucket: Bucket) -> None:
    """Puts the sharded parameters back where others of their layout stand now, with the others' values.

    For the others were made by a method of the module (``to_empty``), and an optimizer may have the former ones.
    """
    with torch.no_grad(), _plain():
        for parameter in bucket.parameters:
            module, name = parameter.places[0]
            registered: Any = module._parameters.get(name)
            former = parameter.sharded
            if registered is former or getattr(registered, "_spec", None) is not former._spec:
                continue
            give_memory(former, local_view(registered))
            for module, name in parameter.places:
                module._parameters[name] = former


def _registered(bucket: Bucket, parameter: ManagedParameter) -> Any:
    """What stands in a parameter's places."""
    objects = [module._parameters.get(name) for module, name in parameter.places]
    module, name = parameter.places[0]
    where = f"fully_shard: parameter {parameter.name!r} of {bucket.owner}"
    for place, each in zip(parameter.places, objects):
        if each is None:
            raise RuntimeError(
                f"{where} is no longer in {type(place[0]).__name__}: what moves parameters (weight_norm, parametrize,"
                " pruning) must be applied before fully_shard"
            )
        if each is not objects[0]:
            raise RuntimeError(
                f"{where} was tied: {name!r} of {type(module).__name__} and {place[1]!r} of {type(place[0]).__name__}"
                " were one tensor, and are two now. Tie or untie before fully_shard"
            )
        if getattr(each, "_spec", None) is not parameter.sharded._spec:
            raise RuntimeError(
                f"{where} was replaced by {type(each).__name__} that is not laid out as {parameter.sharded._spec}."
                " Change a sharded parameter in place, or load values with load_full_state_dict(model, ...)"
            )
    return objects[0]


def _check(bucket: Bucket, found: list[Any]) -> None:
    first, device, dtype = bucket.parameters[0], found[0].device, found[0].dtype
    for parameter, registered in zip(bucket.parameters, found):
        if registered.dtype is not dtype or registered.device != device:
            raise RuntimeError(
                f"fully_shard: of one group's parameters {first.name!r} of {bucket.owner} is {dtype} on {device} now,"
                f" {parameter.name!r} is {registered.dtype} on {registered.device}. Cast and move all of a sharded"
                " module, or none"
            )
    if not dtype.is_floating_point and bucket.dtype.is_floating_point:
        raise RuntimeError(f"fully_shard: parameter {first.name!r} of {bucket.owner} was cast to {dtype}")
    if bucket.offload is not None and device.type not in ("cpu", "meta"):
        raise RuntimeError(
            f"fully_shard: parameter {first.name!r} of {bucket.owner} is on {device}, but with"
            " offload_policy=CPUOffloadPolicy() sharded parameters stay on the host. Materialise them there:"
            ' model.to_empty(device="cpu"); don\'t move a sharded model'
        )
