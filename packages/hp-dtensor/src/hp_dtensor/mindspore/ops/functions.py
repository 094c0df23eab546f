"""MindSpore's kernels, each bound to a rule: the one table to look in for what is supported.

Interception sees kernels, not functions: ``x + 1`` is ``AddScalar``, ``mint.nn.functional.linear`` is ``Dense``; what
is composed of kernels in Python needs nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mindspore import ops

from hp_dtensor.layout.placements import Shard
from hp_dtensor.mindspore.backward.autograd import local_mode
from hp_dtensor.mindspore.ops import local, special
from hp_dtensor.mindspore.ops.dispatching import shapes
from hp_dtensor.rules.arguments import all_dims, last_two, select_arguments
from hp_dtensor.rules.library import dims_argument
from hp_dtensor.rules.planning import Binding, Call, binding_of

BINDINGS: dict[str, Binding] = {}


def bind(
    rule: str,
    kernels: str,
    shapes: Callable[[Call], Any],
    signature: str | None = None,
    operands: str | None = None,
    **options: Any,
) -> None:
    """Bind kernels to a rule.

    Example:
        >>> bind("replicated_dim", "Softmax", shapes.same, "input dim=-1", "input")

    Args:
        rule: name of a rule of ``hp_dtensor.rules``, or ``"view"``.
        kernels: names of kernels, separated by blanks.
        shapes: makes the results' global shapes.
        signature: see ``binding_of``.
        operands: see ``binding_of``.
        options: other fields of ``Binding``.

    Raises:
        ValueError: no such rule.
    """
    for name in kernels.split():
        BINDINGS[name] = binding_of(rule, signature, operands, shapes=shapes, **options)


def _bind_pointwise() -> None:
    bind(
        "pointwise",
        """Abs ACos AcosExt Acosh AcoshExt Asin AsinExt Asinh AsinhExt Atan AtanExt Atan2 Atan2Ext Atanh Addcdiv Addcmul
        BitwiseAnd BitwiseAndScalar BitwiseAndTensor BitwiseNot BitwiseOr BitwiseOrScalar BitwiseOrTensor BitwiseXor
        BitwiseXorScalar BitwiseXorTensor Ceil CeLU ClampScalar Cos Cosh DivMod DivMods Elu EluExt
        EqScalar Equal Erf Erfc Erfinv Exp Exp2 Expm1 Floor FloorDiv FloorDivScalar FmodScalar FmodTensor GeLU Gelu
        GeluExt Greater GreaterEqual GreaterEqualScalar HShrink Hardtanh HSigmoid HSwish Hypot IsClose IsFinite IsInf
        IsNan LeakyReLU LeakyReLUExt Lerp LerpScalar Less LessEqual LessScalar Log Log1p Log2 Log10 LogicalAnd
        LogicalNot LogicalOr LogicalXor LogSigmoid MaskedFill MaskedFillScalar Mish MishExt NanToNum NotEqual
        Pow PowScalarTensor PowTensorScalar ReLU ReLU6 Reciprocal RemainderScalarTensor RemainderTensorScalar
        RemainderTensorTensor Round Rsqrt Select SeLU SeLUExt Sigmoid Sign SiLU Sin Sinc Sinh Softplus SoftplusExt
        SoftShrink Softsign Sqrt Square Tan Tanh Trunc Xlogy""",
        shapes.broadcast,
    )
    # These kernels refuse an empty operand and one that is broadcast to it.
    bind("pointwise", "Maximum Minimum ClampTensor", shapes.broadcast, local=local.over_nothing())
    bind("pointwise", "Cast ToDtype", shapes.same)
    bind("add", "Add AddExt AddScalar Sub SubExt SubScalar", shapes.broadcast)
    bind("add", "AddN", lambda call: [call.shape])
    bind("mul", "Mul Muls", shapes.broadcast)
    bind("div", "Div Divs RealDiv", shapes.broadcast)
    bind("linear_unary", "Neg Clone Contiguous Copy Identity StopGradient ContiguousView", shapes.same)
    bind("value_independent", "ZerosLike ZerosLikeExt OnesLike OnesLikeExt FullLike", shapes.same)
    bind("add", "InplaceAddExt InplaceAddsExt InplaceSubExt InplaceSubScalar", shapes.same, in_place=True)
    bind("add", "InplaceCopy Assign AssignAdd AssignSub", shapes.same, in_place=True)
    bind("mul", "InplaceMul InplaceMuls", shapes.same, in_place=True)
    bind("div", "InplaceDiv InplaceDivs", shapes.same, in_place=True)
    bind("linear_unary", "InplaceZero", shapes.same, in_place=True)
    bind("pointwise", "InplaceFillScalar InplaceClampScalar InplaceReLU InplaceExp", shapes.same, in_place=True)


def _bind_products() -> None:
    bind("matmul", "MatMulExt Mv Mm Bmm BatchMatMulExt Dot", shapes.matmul, local=local.over_nothing())
    bind(
        "matmul_transposed",
        "MatMul BatchMatMul",
        _matmul_shape,
        "input mat2 transpose_a=False transpose_b=False",
        local=local.over_nothing(),
    )
    bind("linear", "Dense", shapes.linear, "input weight bias=None", "input weight bias", local=local.linear)
    bind(
        "rows",
        "Gather",
        shapes.gathered,
        "source index axis=0 batch_dims=0",
        "source index",
        arguments=_gather_arguments,
        local=_gather_local,
    )
    bind(
        "embedding_of",
        "Embedding",
        lambda call: [(*call.shape, call.tensors[1]._spec.shape[1])],
        "input weight padding_idx=None max_norm=None norm_type=2 scale_grad_by_freq=False",
        "input weight",
    )
    bind(
        "bias_add",
        "BiasAdd",
        shapes.same,
        "input bias data_format=None",
        "input bias",
        arguments=local.channel_arguments,
        local=local.over_nothing(local.bias_add),
    )
    bind(
        "layer_norm",
        "LayerNorm",
        shapes.normed,
        "input weight bias begin_norm_axis=1 begin_params_axis=1 epsilon=None",
        "input weight bias",
        local=local.layer_norm,
    )
    bind(
        "norm",
        "LayerNormExt",
        shapes.same,
        "input normalized_shape weight=None bias=None eps=None",
        "input weight bias",
        arguments=local.norm_arguments,
    )


def _matmul_shape(call: Call) -> list[Any]:
    a, b = (tensor._spec.shape for tensor in call.tensors[:2])
    if call.bound["transpose_a"]:
        a = (*a[:-2], a[-1], a[-2])
    if call.bound["transpose_b"]:
        b = (*b[:-2], b[-1], b[-2])
    if a[-1] != b[-2]:
        raise ValueError(
            f"{call.name}: shapes {a} and {b} can't be multiplied. This happens when local tensors of uneven shards are"
            " treated as even ones: keep them DTensors (use_local_output=False), or name the shape"
            " (DTensor.from_local(..., shape=))"
        )
    lead = shapes.broadcast_shapes(a[:-2], b[:-2]) if a[:-2] or b[:-2] else ()
    return [(*lead, a[-2], b[-1])]


def _gather_arguments(call: Call) -> dict[str, Any]:
    local.gather_arguments(call)
    return {"axis": dims_argument(call.bound["axis"], len(call.shape))[0]}


def _gather_local(call: Call) -> Any:
    first = dims_argument(call.bound["axis"], len(call.shape)) == (0,)
    sharded = first and any(p == Shard(0) for p in call.targets[0].placements)
    return local.rows(call) if sharded else local.over_nothing()(call)


def _bind_reductions() -> None:
    one = ("input dim=None keepdim=False dtype=None", "input")
    bind("sum", "SumExt", shapes.reduced, *one, local=local.over_nothing())
    bind("mean", "MeanExt", shapes.reduced, *one, local=local.over_nothing(local.mean))
    # Extremes and products gather what they reduce: a rank's gradient depends on the others' elements.
    bind("whole_reduction", "ProdExt DeprecatedProd", shapes.reduced, *one)
    spread = "input dim=None correction=None keepdim=False"
    bind("whole_reduction", "Std Var DeprecatedStd DeprecatedVar", shapes.reduced, spread, "input")
    bind("whole_reduction", "ReduceStd", shapes.reduced_twice, "input dim=None unbiased=True keepdim=False", "input")
    bind("whole_reduction", "Max Min", lambda call: [()], "input", "input")
    bind("whole_reduction", "ReduceMax ReduceMin", shapes.reduced, "input dim=None keepdim=False", "input")
    bind("min", "ReduceAll All AllExt", shapes.reduced, "input dim=None keepdim=False", "input")
    bind("max", "ReduceAny Any AnyExt", shapes.reduced, "input dim=None keepdim=False", "input")
    bind(
        "sum",
        "ReduceSum",
        shapes.reduced,
        "input dim=None keepdim=False skip_mode=False",
        "input",
        local=local.over_nothing(),
    )
    bind(
        "mean",
        "ReduceMean",
        shapes.reduced,
        "input dim=None keepdim=False",
        "input",
        local=local.over_nothing(local.mean),
    )
    bind(
        "sum",
        "DeprecatedSum",
        lambda call: shapes.reduced_over(call.shape, call.bound["axis"], call.bound["keepdims"]),
        "input axis=None dtype=None keepdims=False initial=None",
        "input",
        arguments=lambda call: {"dim": call.bound["axis"], "keepdim": call.bound["keepdims"]},
        local=local.over_nothing(),
    )
    chosen = "Argmax ArgMaxExt ArgMinExt DeprecatedArgmax DeprecatedArgmin"
    bind("whole_reduction", chosen, shapes.one_reduced, "input dim=None keepdim=False", "input")
    extremes = "ArgMaxWithValue ArgMinWithValue MaxDim MinDim"
    bind("whole_reduction", extremes, shapes.reduced_twice, "input dim=0 keepdim=False", "input")
    bind("replicated_dim", "Softmax LogSoftmax LogSoftmaxExt", shapes.same, "input dim=-1 dtype=None", "input")
    bind("linear_whole_dims", "CumsumExt CumSum", shapes.same, "input dim exclusive=False reverse=False", "input")
    bind("replicated_dim", "CumProd", shapes.same, "input dim exclusive=False reverse=False", "input")
    bind("replicated_dim", "Cummax Cummin CummaxExt CumminExt", lambda call: [call.shape] * 2, "input dim", "input")
    by_axis = {"arguments": lambda call: {"dim": call.attributes["axis"]}}
    bind("replicated_dim", "Sort", lambda call: [call.shape] * 2, "input", "input", **by_axis)
    bind(
        "replicated_dim",
        "SortExt",
        lambda call: [call.shape] * 2,
        "input dim=-1 descending=False stable=False",
        "input",
    )
    bind("replicated_dim", "TopK TopkExt", shapes.top, "input k dim=-1 largest=True sorted=True", "input")


def _bind_moves() -> None:
    bind("view", "Reshape View", shapes.reshape, local=local.view)
    bind("view", "Flatten", shapes.rows, local=local.view)
    bind("view", "FlattenExt", shapes.flatten, "input start_dim=0 end_dim=-1", "input", local=local.view)
    bind("view", "ExpandDims ExpandDimsView", shapes.expand_dims, "input dim", "input", local=local.view)
    bind("view", "Squeeze", shapes.squeeze, "input dim=None", "input", local=local.view)
    permuted = shapes.permuted(local.permute_arguments)
    bind("permute", "Transpose TransposeView DeprecatedTranspose", permuted, arguments=local.permute_arguments)
    swapped = shapes.permuted(local.transpose_arguments)
    bind(
        "permute",
        "TransposeExtView",
        swapped,
        "input dim0 dim1",
        "input",
        arguments=local.transpose_arguments,
    )
    bind("expand", "BroadcastTo BroadcastToView ExpandAs", shapes.expanded, local=local.expand)
    bind("cat", "Concat", shapes.concatenated, "tensors dim=0", "tensors")
    bind("stack", "StackExt", shapes.stacked, "tensors dim=0", "tensors")
    bind("stack", "Stack", _stacked_by_axis, "tensors axis=0", "tensors", arguments=lambda c: {"dim": c.bound["axis"]})
    names = "input split_size_or_sections dim=0"
    bind(
        "linear_whole_dims", "SplitTensor SplitTensorView SplitWithSize SplitWithSizeView", shapes.split, names, "input"
    )
    bind("linear_whole_dims", "Split", shapes.sections, "input dim=0 sections=1", "input")
    bind("linear_whole_dims", "Chunk ChunkView", shapes.chunked, "input chunks dim=0", "input")
    bind("linear_whole_dims", "Narrow NarrowView", shapes.narrowed, "input dim start length", "input")
    bind(
        "linear_whole_dims",
        "Slice",
        shapes.sliced,
        "input begin size",
        "input",
        arguments=local.slice_arguments,
        local=local.slice_,
    )
    bind("linear_whole_dims", "Triu Tril TrilExt", shapes.same, "input diagonal=0", "input", arguments=last_two)
    bind("linear_whole_dims", "Tile", shapes.tiled, arguments=all_dims)
    bind("unbind", "Unstack", _unstacked_by_axis, "input", "input", arguments=lambda c: {"dim": c.attributes["axis"]})
    bind("moved_replicated_dim", "ReverseV2", shapes.same, "input dim", "input")
    bind("pad", "PadV3", shapes.padded, "input paddings value=None", "input", arguments=local.pad_arguments)
    bind("unbind", "UnstackExtView UnstackExt", shapes.unstacked, "input dim=0", "input")
    bind(
        "index",
        "SelectExtView SelectExt",
        shapes.selected,
        "input dim index",
        "input",
        arguments=select_arguments,
        local=local.select,
    )
    names, found = "input dim index", local.over_nothing(special.looked_up)
    bind("masked_gather", "GatherD", shapes.like_index, names, "input index", local=found)
    bind("whole", "OneHot OneHotExt", lambda call: [(*call.shape, int(call.args[1]))])


def _stacked_by_axis(call: Call) -> Any:
    call.bound["dim"] = call.bound["axis"]
    return shapes.stacked(call)


def _unstacked_by_axis(call: Call) -> Any:
    call.bound["dim"] = call.attributes["axis"]
    return shapes.unstacked(call)


_bind_pointwise()
_bind_products()
_bind_reductions()
_bind_moves()

_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}
"""As kernels number them."""


# ---- shapes ----
def _asked(call: Call) -> list[Any]:
    """Return the kernel's result for one image of zeros, because its sizes depend on strides, padding and modes."""
    first = call.tensors[0]._spec.shape
    tensors = iter(call.tensors)

    def zeros(value: Any) -> Any:
        if not hasattr(value, "_spec"):
            return value
        shape = next(tensors)._spec.shape
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
    return [call.shape, *[call.tensors[1]._spec.shape] * 4]


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
