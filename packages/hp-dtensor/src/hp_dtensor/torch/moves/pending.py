"""DTensors whose redistribution still runs beside what follows.

Note [A pending DTensor]
On a device with streams a redistribution is issued on a side stream, all steps of it, and the current stream waits for
it at the result's first use. Until then the result is of a class of its own: whatever reads it (an operation, an
attribute, a method) comes by that class, which waits and makes it a DTensor like any other. Dispatch looks for DTensor
itself, so all other tensors pay nothing. Only with interception off does an operation pass the class by;
``SkipDTensorDispatch`` therefore waits for everything that is pending when it is entered, and inside it nothing becomes
pending. Autograd runs the redistribution's backward on the side stream, and orders it with the others by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from hp_dtensor.torch.backward.autograd import waiting
from hp_dtensor.torch.dtensor import DTensor
from hp_platform import get_platform

_impl: Any = torch._C._disabled_torch_function_impl


class PendingDTensor(DTensor):
    """A DTensor that is being made; a DTensor from its first use on. See Note [A pending DTensor]."""

    def __getattribute__(self, name: str) -> Any:
        finish(self)
        return getattr(self, name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        finish(self)
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _pending((args, kwargs)):
            finish(tensor)
        return func(*args, **(kwargs or {}))


def _pending(value: Any) -> Iterator[torch.Tensor]:
    if type(value) is PendingDTensor:
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _pending(each)
    elif isinstance(value, dict):
        yield from _pending(list(value.values()))


def possible(x: DTensor) -> bool:
    """Tell whether something can run beside the current stream on the device of ``x``, here."""
    devices = get_platform().devices
    return devices.capabilities.streams and x.device.type == devices.kind and torch._C._is_torch_function_enabled()


def aside(x: DTensor, run: Callable[[], DTensor]) -> DTensor:
    """Run ``run`` on ``x`` on a side stream.

    Args:
        x: what ``run`` reads.
        run: makes a new DTensor.

    Returns:
        The DTensor, pending.
    """
    devices = get_platform().devices
    module = devices.device_module()
    side = _side_stream(devices.current_device())
    side.wait_stream(module.current_stream())
    with module.stream(side):
        result = run()
        event = side.record_event()
    _keep(x, side)
    result._ready = event  # type: ignore[attr-defined]
    result.__class__ = PendingDTensor
    key = id(result)
    reference = weakref.ref(result, lambda _: waiting.pop(key, None))

    def ended() -> None:
        found = reference()
        if found is not None:
            finish(found)

    waiting[key] = ended
    return result


def finish(x: torch.Tensor) -> None:
    """Make the current stream wait for ``x`` if it is pending."""
    if type(x) is not PendingDTensor:
        return
    x.__class__ = DTensor  # type: ignore[assignment]
    waiting.pop(id(x), None)
    current = get_platform().devices.device_module().current_stream()
    current.wait_event(vars(x).pop("_ready"))
    _keep(x, current)


def _keep(x: torch.Tensor, stream: Any) -> None:
    """Keep the memory of ``x``, even if it is freed, until the work queued on ``stream`` has used it."""
    _impl(torch.Tensor.record_stream, (), (x, stream))


@cache
def _side_stream(device: Any) -> Any:
    return get_platform().devices.stream()
