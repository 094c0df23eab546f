"""The torch functions, each bound to a rule: the last of the tables that a call of a function is looked up in.

`dispatching/dispatch.py` asks the handlers before these rules: those of `dispatching/special.py`, in whose table
`whole.py` (gathered values), `composites.py` (other operations) and a few modules more put theirs. A handler may call
`dispatch.planned`, which takes the rule from here. A function in neither table raises NotImplementedError.

Some shapes of results are known without asking torch, whose meta functions take longer than all the rest of a plan.
None is the answer where the arguments don't fit: torch is asked then, and says so in its own words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from hp_dtensor.rules.arguments import all_dims, last_two, select_arguments
from hp_dtensor.rules.library import dims_argument
from hp_dtensor.rules.planning import Binding, binding_of
from hp_dtensor.torch.ops import local
from hp_dtensor.torch.ops.dispatching.calls import functions_of
from hp_platform.torch import heavy
from hp_platform.torch.internals import getter, nn_functions

if TYPE_CHECKING:
    from hp_dtensor.rules.planning import Call


Shape = tuple[int, ...]
_NUMBERS = (type(None), int, float)


def broadcast(call: Call) -> list[Shape] | None:
    """Return the shape to which all operands broadcast."""
    sizes: list[int] = []
    for spec in call.specs:
        shape = spec.shape
        sizes[:0] = [1] * (len(shape) - len(sizes))
        start = len(sizes) - len(shape)
        for index, size in enumerate(shape, start):
            if sizes[index] != size:
                if 1 not in (sizes[index], size):
                    return None
                sizes[index] = size if sizes[index] == 1 else sizes[index]
    return [tuple(sizes)]


def reduced(call: Call) -> list[Shape] | None:
    """Return the operand's shape without the dims ``dim``, or with size one there."""
    shape, dim, keepdim = call.specs[0].shape, call.bound["dim"], call.bound["keepdim"]
    if type(keepdim) is not bool or not (dim is None or type(dim) is int or type(dim) in (tuple, list)):
        return None
    try:
        dims = dims_argument(dim, len(shape))
    except (IndexError, TypeError):
        return None
    if len(set(dims)) != len(dims):
        return None
    if keepdim:
        return [tuple(1 if d in dims else size for d, size in enumerate(shape))]
    return [tuple(size for d, size in enumerate(shape) if d not in dims)]


def linear(call: Call) -> list[Shape] | None:
    """Return the input's shape with one feature per row of the weight."""
    shape, weight, *bias = (spec.shape for spec in call.specs)
    if not shape or len(weight) != 2 or shape[-1] != weight[1] or any(each != weight[:1] for each in bias):
        return None
    return [(*shape[:-1], weight[0])]


def concatenated(call: Call) -> list[Shape] | None:
    """Return the shape of tensors one after the other along ``dim``."""
    first, *others = (spec.shape for spec in call.specs)
    dim = call.bound["dim"]
    if type(dim) is not int or not -len(first) <= dim < len(first) or len(call.specs) != len(call.tensors):
        return None
    dim %= len(first)
    rest = first[:dim], first[dim + 1 :]
    if any(len(shape) != len(first) or (shape[:dim], shape[dim + 1 :]) != rest for shape in others):
        return None
    return [(*rest[0], first[dim] + sum(shape[dim] for shape in others), *rest[1])]


def attended(call: Call) -> list[Shape] | None:
    """Return the shape of queries with the size of values: batch and heads are the same, or heads are grouped."""
    query, key, value, *mask = (spec.shape for spec in call.specs)
    bound, (dtype, *dtypes) = call.bound, [tensor.dtype for tensor in call.given]
    grouped, causal = bound["enable_gqa"], bound["is_causal"]
    if not len(query) == len(key) == len(value) == 4 or 0 in (*query, *key, *value) or dtypes[:2] != [dtype, dtype]:
        return None
    if not dtype.is_floating_point or any(type(bound[name]) not in _NUMBERS for name in ("scale", "dropout_p")):
        return None
    if key[-1] != query[-1] or key[:-1] != value[:-1] or key[0] != query[0] or type(causal) is not bool:
        return None
    if query[1] != key[1] and (grouped is not True or query[1] % key[1]):
        return None
    whole = (*query[:3], key[2])
    if mask and (causal or dtypes[2] not in (dtype, torch.bool) or not _broadcasts(mask[0], whole)):
        return None
    return [(*query[:3], value[-1])]


def _broadcasts(shape: Shape, to: Shape) -> bool:
    return 2 <= len(shape) <= len(to) and all(mine in (1, size) for mine, size in zip(shape[::-1], to[::-1]))


T = torch.Tensor
BINDINGS: dict[Any, Binding] = {}


def bind(rule: str, functions: Any, signature: str | None = None, operands: str | None = None, **options: Any) -> None:
    """Bind torch functions to a rule.

    Example:
        >>> bind("linear_whole_dims", torch.cumsum, "input dim dtype=None", "input")

    Args:
        rule: name of a rule of ``hp_dtensor.rules``, or ``"view"``.
        functions: a function, a list of functions, or a string of names that are looked up in torch's namespaces.
        signature: see ``binding_of``.
        operands: see ``binding_of``.
        options: other fields of ``Binding``.

    Raises:
        ValueError: no such rule, or no function of these names.
        TypeError: what is no function.
    """
    binding = binding_of(rule, signature, operands, **options)
    found = (
        functions_of(functions)
        if isinstance(functions, str)
        else functions
        if isinstance(functions, list)
        else [functions]
    )
    if not found:
        raise ValueError(f"bind: no searched namespace of torch has {functions!r}; pass the functions")
    for func in found:
        if not callable(func):
            raise TypeError(f"bind: {func!r} is not a function")
        BINDINGS[func] = binding


def _bind_pointwise() -> None:
    """Element-by-element functions, with their in-place forms and operators."""
    nonlinear = """abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atan2 arctan2
        atanh bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift ceil celu clamp
        clamp_max clamp_min clip copysign cos cosh deg2rad digamma elu eq equal_ erf erfc erfinv exp exp2 expit expm1
        fix float_power floor floor_divide fmax fmin fmod frac gcd ge gelu greater greater_equal gt hardshrink
        hardsigmoid hardswish hardtanh heaviside hypot i0 isclose isfinite isinf isnan isneginf isposinf isreal lcm
        ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
        logical_not logical_or logical_xor logit logsigmoid lt mish nan_to_num ne nextafter not_equal
        pow polygamma rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin
        sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold trunc true_divide_ xlogy
        xlog1py where masked_fill addcmul addcdiv bool int long short char byte igamma igammac mvlgamma angle polar
        complex frexp __and__ __or__ __xor__ __rand__
        __ror__ __rxor__ __invert__ __lshift__ __rshift__ __rpow__ __rsub__ __rtruediv__ __rdiv__ __rfloordiv__
        __floordiv__ __mod__ __rmod__ __pow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __abs__ fill"""
    special = """airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u
        chebyshev_polynomial_v chebyshev_polynomial_w entr erfcx gammainc gammaincc gammaln hermite_polynomial_h
        hermite_polynomial_he i0e i1 i1e laguerre_polynomial_l legendre_polynomial_p log_ndtr modified_bessel_i0
        modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln ndtr ndtri psi scaled_modified_bessel_k0
        scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
        shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 zeta"""
    bind("pointwise", nonlinear + " " + special)
    for name in nonlinear.split():
        if not name.startswith("_") and not name.endswith("_") and functions_of(f"{name}_"):
            bind("pointwise", f"{name}_", in_place=True)
    bind(
        "pointwise", "__iand__ __ior__ __ixor__ __ilshift__ __irshift__ __ipow__ __ifloordiv__ __imod__", in_place=True
    )
    bind("add", "add sub subtract __add__ __radd__ __sub__", shapes=broadcast)
    bind("add", "add_ sub_ subtract_ __iadd__ __isub__", in_place=True)
    bind("copy", "copy_", in_place=True)
    bind("mul", "mul multiply __mul__ __rmul__", shapes=broadcast)
    bind("mul", "mul_ multiply_ __imul__", in_place=True)
    bind(
        "div",
        "div divide true_divide __truediv__ __div__",
        "input other rounding_mode=None",
        "input other",
        shapes=broadcast,
    )
    bind(
        "div",
        "div_ divide_ true_divide_ __itruediv__ __idiv__",
        "input other rounding_mode=None",
        "input other",
        in_place=True,
    )
    bind(
        "linear_unary",
        "neg negative conj conj_physical resolve_conj resolve_neg __neg__ real imag",
    )
    bind("copy", "clone contiguous positive alias __pos__")
    bind("linear_unary", "neg_ negative_ conj_physical_", in_place=True)
    bind("pointwise", "fill_ zero_", in_place=True, solve=local.solve, local=local.fill)
    for wrapper, kernel in ((F.silu, nn_functions.silu), (F.relu, torch.relu)):
        bind("pointwise", wrapper, local=local.unwrapped(kernel))
    bind("pointwise", "float double half bfloat16 cfloat cdouble chalf type", like=True)
    bind("to", "to cpu cuda", like=True, arguments=local.to_arguments)
    bind("pointwise", "type_as", like=True)
    bind("maximum", "maximum")
    bind("minimum", "minimum")
    bind("value_independent", "zeros_like ones_like full_like empty_like")


def _bind_products() -> None:
    bind("matmul", "matmul mm bmm mv __matmul__ dot")
    bind("outer", "outer ger")
    bind(
        "cross",
        [torch.cross, T.cross],
        "input other dim=None",
        "input other",
        arguments=local.cross_arguments,
        local=local.cross,
    )
    bind("cross", torch.linalg.cross, "input other dim=-1", "input other")
    names, shapes = ("input weight bias=None", "input weight bias"), linear
    bind("linear", F.linear, *names, local=local.biased, shapes=shapes)
    bind("linear", heavy.linear, *names, local=local.biased, shapes=shapes)
    bind("einsum", torch.einsum, arguments=local.einsum_arguments)
    bind(
        "embedding",
        F.embedding,
        "input weight padding_idx=None max_norm=None norm_type=2 scale_grad_by_freq=False sparse=False",
        "input weight",
        local=local.embedding,
    )
    names = "input mat2 offs=None bias=None out_dtype=None"
    bind("grouped_matmul", "grouped_mm _grouped_mm", names, "input mat2 offs")
    bind(
        "attention",
        F.scaled_dot_product_attention,
        "query key value attn_mask=None dropout_p=0 is_causal=False scale=None enable_gqa=False",
        "query key value attn_mask",
        local=local.attention,
        shapes=attended,
    )
    bind(
        "norm",
        [F.layer_norm, torch.layer_norm],
        "input normalized_shape weight=None bias=None eps=None cudnn_enable=True",
        "input weight bias",
    )
    bind("norm", [F.rms_norm, torch.rms_norm], "input normalized_shape weight=None eps=None", "input weight")
    bind(
        "cross_entropy",
        F.cross_entropy,
        "input target weight=None size_average=None ignore_index=-100 reduce=None reduction=mean label_smoothing=0",
        "input target weight",
        local=local.cross_entropy,
    )
    bind(
        "cross_entropy",
        F.nll_loss,
        "input target weight=None size_average=None ignore_index=-100 reduce=None reduction=mean",
        "input target weight",
        local=local.cross_entropy,
    )


def _bind_reductions() -> None:
    one = ("input dim=None keepdim=False dtype=None", "input")
    bind("sum", "sum", *one, shapes=reduced)
    bind("mean", "mean", *one, local=local.mean, shapes=reduced)
    bind("amax", "amax", *one)
    bind("amin", "amin", *one)
    bind("product", "prod", *one)
    bind("max", "any", *one)
    bind("min", "all", *one)
    bind("whole_reduction", "argmax argmin nansum nanmean count_nonzero median nanmedian mode aminmax logsumexp", *one)
    statistics = "input dim=None unbiased=True keepdim=False correction=None"
    bind("statistics", "var std var_mean std_mean", statistics, "input", arguments=local.statistics_arguments)
    bind("whole_reduction", torch.linalg.vector_norm, "x ord=2 dim=None keepdim=False dtype=None", "x")
    bind("histogram", "histc", "input bins=100 min=0 max=0", "input")
    bind("replicated_dim", "softmax log_softmax", "input dim=-1 dtype=None", "input")
    bind("replicated_dim", [F.softmax, F.log_softmax, F.softmin], "input dim=-1 _stacklevel=3 dtype=None", "input")
    bind("replicated_dim", "cummax cummin cumprod logcumsumexp", "input dim dtype=None", "input")
    bind("replicated_dim", "sort argsort", "input dim=-1 descending=False stable=False", "input")
    bind("replicated_dim", "topk", "input k dim=-1 largest=True sorted=True", "input")
    bind("replicated_dim", "kthvalue", "input k dim=-1 keepdim=False", "input", arguments=all_dims)
    bind("linear_whole_dims", "cumsum", "input dim dtype=None", "input")
    bind("replicated_dim", F.normalize, "input p=2 dim=1 eps=None out=None", "input")
    bind("replicated_dim", F.glu, "input dim=-1", "input")


def _bind_moves() -> None:
    bind("view", "view reshape flatten unflatten squeeze unsqueeze", local=local.view)
    bind("view", "ravel", local=local.view)
    bind("permute", "permute", local=None, arguments=local.permute_arguments)
    bind("permute", "transpose swapdims", "input dim0 dim1", "input", arguments=local.transpose_arguments)
    bind("permute", "swapaxes", "input axis0 axis1", "input", arguments=local.transpose_arguments)
    bind("permute", "movedim moveaxis", "input source destination", "input", arguments=local.movedim_arguments)
    bind("permute", "t adjoint", arguments=local.reverse_arguments)
    bind("permute", [getter("T"), getter("mT")], arguments=local.reverse_arguments)
    bind("expand", "expand broadcast_to", local=local.expand)
    bind("cat", "cat concat concatenate", "tensors dim=0", "tensors", shapes=concatenated)
    bind("stack", "stack", "tensors dim=0", "tensors")
    bind("moved_replicated_dim", "flip", "input dims", "input", arguments=local.flip_arguments)
    bind("moved_replicated_dim", "roll", "input shifts dims=None", "input", arguments=local.flip_arguments)
    bind("linear_whole_dims", "tril triu", "input diagonal=0", "input", arguments=last_two)
    bind("moved_replicated_dim", "split split_with_sizes tensor_split", "input split_size_or_sections dim=0", "input")
    bind("moved_replicated_dim", "chunk unsafe_chunk", "input chunks dim=0", "input")
    bind("moved_replicated_dim", "narrow", "input dim start length", "input")
    bind(
        "moved_replicated_dim",
        "repeat_interleave",
        "input repeats dim=None output_size=None",
        "input",
        arguments=local.repeat_interleave,
    )
    bind("expand", "repeat tile", hot=False)
    bind("pairs", "view_as_real view_as_complex")
    bind("unbind", "unbind", "input dim=0", "input")
    bind("index", "select", "input dim index", "input", arguments=select_arguments)
    bind("index", T.__getitem__, arguments=local.index_arguments, local=local.index, hot=False)  # tensors: indexing
    bind("index", "index_select", "input dim index", "input index", arguments=local.index_select_arguments)
    bind("masked_gather", "gather", "input dim index sparse_grad=False", "input index", local=local.gather)
    bind("gather", "take_along_dim", "input indices dim=None", "input indices")
    bind("pad", F.pad, "input pad mode=constant value=None", "input", arguments=local.pad_arguments)


def _bind_neural() -> None:
    images = "input weight bias=None stride=1 padding=0 dilation=1 groups=1"
    transposed = "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1"
    for names, signature in (
        ("conv1d conv2d conv3d", images),
        ("conv_transpose1d conv_transpose2d conv_transpose3d", transposed),
    ):
        operands = {"operands": "input weight bias", "arguments": local.convolution_arguments, "local": local.biased}
        bind("convolution", names, signature, **operands)
    pools = """avg_pool{0}d max_pool{0}d max_pool{0}d_with_indices adaptive_avg_pool{0}d adaptive_max_pool{0}d
        adaptive_max_pool{0}d_with_indices lp_pool{0}d"""
    for dims in (1, 2, 3):
        bind("leading", pools.format(dims), arguments=local.trailing(dims))
    bind("leading", "interpolate upsample upsample_nearest upsample_bilinear", arguments=local.trailing(-2))
    bind("leading", "pixel_shuffle pixel_unshuffle", arguments=local.trailing(3))
    bind("leading", F.unfold, arguments=local.trailing(3))
    bind("leading", "channel_shuffle grid_sample", arguments=local.trailing(-1))
    norm = "input num_groups weight=None bias=None eps=0 cudnn_enabled=True"
    free = {
        "arguments": lambda call: {"free": (0,)},
        "local": lambda call: torch.group_norm,
    }  # F's counts a part's rows
    bind("channels", "group_norm", norm, "input weight bias", **free)
    norm = "input running_mean=None running_var=None weight=None bias=None use_input_stats=True momentum=0 eps=0"
    bind(
        "channels",
        F.instance_norm,
        norm,
        "input running_mean running_var weight bias",
        arguments=lambda call: {"free": (0, 1)},
    )
    bind(
        "channels",
        F.batch_norm,
        "input running_mean running_var weight=None bias=None training=False momentum=0 eps=0",
        "input running_mean running_var weight bias",
        arguments=lambda call: {"free": range(len(call.specs[0].shape))},
    )
    bind("replicated_dim", torch.ops.aten._safe_softmax.default, "input dim dtype=None", "input")


_bind_pointwise()
_bind_products()
_bind_reductions()
_bind_moves()
_bind_neural()
