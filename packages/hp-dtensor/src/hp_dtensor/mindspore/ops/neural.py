"""Kernels of images and losses, each bound to a rule: convolutions, pools, normalisations, losses."""

from __future__ import annotations

import math
from typing import Any

from mindspore import ops

from hp_dtensor.mindspore.backward.autograd import local_mode
from hp_dtensor.mindspore.ops.dispatching import shapes
from hp_dtensor.mindspore.ops.dispatching.bindings import bind
from hp_dtensor.rules.planning import Call

_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}
"""As kernels number them."""


# ---- shapes ----
def _asked(call: Call) -> list[Any]:
    """Return the kernel's result for one image of zeros, because its sizes depend on strides, padding and modes."""
    first = call.tensors[0]._spec.shape  # type: ignore[union-attr]
    tensors = iter(call.tensors)

    def zeros(value: Any) -> Any:
        if not hasattr(value, "_spec"):
            return value
        shape = next(tensors)._spec.shape  # type: ignore[union-attr]
        return ops.zeros((1, *first[1:]) if shape is first else shape, value.dtype)

    with local_mode():
        result = call.func([zeros(value) for value in call.args], call.kwargs)
        result = result if isinstance(result, (tuple, list)) else [result]
        return [(first[0], *value.shape[1:]) for value in result]


def _reduction(call: Call) -> str:
    value: Any = call.bound.get("reduction", call.attributes.get("reduction", "mean"))
    return str(_REDUCTIONS.get(value, value))


def _loss_shape(call: Call) -> list[Any]:
    return shapes.broadcast(call) if _reduction(call) == "none" else [()]


# ---- local functions ----
def _sum_by_count(call: Call) -> Any:
    """Compute a mean as this rank's sum divided by the global count: a term of the global mean.

    On one rank, too: MindSpore's gradient of a mean of ``BCEWithLogitsLoss`` has the size of the first one's operands.
    """
    if _reduction(call) != "mean":
        return None
    run, count, place = call.func, math.prod(shapes.broadcast(call)[0]), list(call.bound).index("reduction")

    def summed(args: Any, kwargs: Any) -> Any:
        arguments = [*args[:place], 0, *args[place + 1 :]] if len(args) > place else args
        return run(arguments, kwargs if len(args) > place else {**kwargs, "reduction": 0}) / count

    return summed


def _share_of_mean(call: Call) -> Any:
    """Return this rank's mean times its share of all elements (of all rows, if the target has one entry per row)."""
    here, there = call.targets[1].local_shape, call.targets[1].shape
    if call.attributes.get("reduction", "mean") != "mean" or here == there:
        return None
    run, share = call.func, math.prod(here) / math.prod(there)
    return lambda args, kwargs: run(args, kwargs) * share


def _convolution(call: Call) -> Any:
    """With as many channels as this rank's part of the weight makes: the primitive that was called names all."""
    channels = call.targets[1].local_shape[0]
    if channels == call.targets[1].shape[0]:
        return None
    attributes = call.attributes
    names = ("kernel_size", "mode", "pad_mode", "pad", "dilation", "group", "data_format")
    options = {name: attributes[name] for name in names if name in attributes}
    options["pad"] = options["pad"] if attributes["pad_mode"] == "pad" else 0
    convolution = ops.Conv2D(channels, stride=attributes["stride"][2:], **options)
    return lambda args, kwargs: convolution(*args)


def _normed_image(call: Call) -> list[Any]:
    """``GroupNorm``: the result, and mean and variance by image and group."""
    statistics = (call.shape[0], int(call.bound["groups"]))
    return [call.shape, statistics, statistics]


def _batch_normed(call: Call) -> list[Any]:
    return [call.shape, *[call.tensors[1]._spec.shape] * 4]  # type: ignore[union-attr]


def _bind_images() -> None:
    def groups(call: Call) -> dict[str, Any]:
        return {"groups": call.attributes.get("group", 1), "transposed": False}

    bind("convolution", "Conv2D", _asked, "input weight", "input weight", arguments=groups, local=_convolution)
    planes, volumes = "MaxPool MaxPoolWithArgmaxV2 AvgPool AdaptiveAvgPool2D AdaptiveMaxPool2D", "MaxPool3D AvgPool3D"
    bind("leading", planes, _asked, arguments=lambda call: {"trailing": 2})
    bind("leading", volumes, _asked, arguments=lambda call: {"trailing": 3})
    bind(
        "images",
        "GroupNorm",
        _normed_image,
        "input groups weight bias eps=None",
        "input weight bias",
    )
    bind(
        "batch_norm",
        "BatchNorm",
        _batch_normed,
        "input weight bias mean variance training=False eps=None momentum=None data_format=0",
        "input weight bias mean variance",
    )
    bind("prelu", "PReLU", shapes.same, "input weight", "input weight")


def _bind_losses() -> None:
    def reduction(call: Call) -> dict[str, Any]:
        return {"reduction": _reduction(call)}

    options: dict[str, Any] = {"arguments": reduction, "local": _sum_by_count}
    bind("loss", "BinaryCrossEntropy", _loss_shape, "input target weight=None reduction=1", **options)
    names = "input target weight=None posWeight=None reduction=1"
    bind("loss", "BCEWithLogitsLoss", _loss_shape, names, **options)
    bind("loss", "SmoothL1Loss", _loss_shape, "input target beta=None reduction=2", **options)
    bind("loss", "MSELossExt L1LossExt", _loss_shape, "input target reduction=1", **options)
    bind("loss", "KLDivLoss", _loss_shape, "input target", arguments=reduction, local=_share_of_mean)
    bind("rows_loss", "SoftmaxCrossEntropyWithLogits", lambda call: [call.shape[:1], call.shape])
    bind("rows_loss", "SparseSoftmaxCrossEntropyWithLogits", lambda call: [()], local=_share_of_mean)


_bind_images()
_bind_losses()
