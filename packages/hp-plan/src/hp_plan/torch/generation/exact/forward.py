"""A model whose whole forward, in training and in generation, is exact.

Note [Above autograd]
    Inside of a module's forward a mode sees each call of a function of torch. Products by weights, and sums and norms
    of a row, go by `rows.by_rows`, functions of elements by `rows.elementwise`, and both call torch's own functions, so
    gradients flow as always. Products that are not known to be exact are refused by their name. Each module enters the
    mode by itself, not the model alone: a module that is computed again in a backward is exact there, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hp_plan.torch.generation.exact import attention
from hp_plan.torch.generation.exact.rows import by_rows, cancelling, elementwise

T = torch.Tensor
_here = threading.local()
_LEAVE = "leave run.generation out"


def make_exact(model: nn.Module) -> None:
    """Let the forward of a causal language model of transformers be exact, in training and in generation.

    Raises:
        NotImplementedError: what is not exact here.
    """
    config: Any = model.config
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise NotImplementedError(f"generation = 'exact': {name} drops out with p = {module.p:g}; {_LEAVE}")
    attention.register()
    owner: Any = model
    owner.set_attn_implementation(attention.NAME)
    if hasattr(config, "_experts_implementation"):
        owner.set_experts_implementation("eager")  # one expert after the other, whose sums have their order
    for module in model.modules():
        module.forward = _Within(module.forward, _check_call if module is model else None)


def is_exact(model: nn.Module) -> bool:
    """Return True for a model that `make_exact` has changed, or one around it."""
    return any(isinstance(vars(module).get("forward"), _Within) for module in model.modules())


@contextlib.contextmanager
def exact(on: bool = True) -> Iterator[None]:
    """Inside, what torch computes of rows is exact, unless it is off."""
    if not on or getattr(_here, "mode", None) is not None:
        yield
        return
    if torch.is_autocast_enabled("cpu"):
        raise NotImplementedError(f"generation = 'exact': torch.autocast is not supported; {_LEAVE}")
    _here.mode = _Mode()
    try:
        with _here.mode, attention.known_blocks():
            yield
    finally:
        _here.mode = None


class _Within:
    """A forward inside of the mode.

    Args:
        inner: the forward.
        check: of the model's arguments, by name.
    """

    def __init__(self, inner: Callable[..., Any], check: Callable[[dict[str, Any]], None] | None) -> None:
        functools.update_wrapper(self, inner)
        self._inner, self._check = inner, check

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._check is not None:
            names = inspect.signature(self._inner).parameters
            arguments = dict(zip(names, args)) | options
            self._check(arguments)
            if len(args) < len(names) and "position_ids" not in [*names][: len(args)]:
                options = {**options, "position_ids": arguments["position_ids"]}
        if getattr(_here, "mode", None) is not None:
            return self._inner(*args, **options)
        with exact():
            return self._inner(*args, **options)


def _check_call(arguments: dict[str, Any]) -> None:
    """Refuse what is not exact, and count places from each text's first token where the caller does not."""
    cache, mask = arguments.get("past_key_values"), arguments.get("attention_mask")
    if cache is not None and type(cache).__name__ != "DynamicCache":
        raise NotImplementedError(
            f"generation = 'exact': a cache of the type {type(cache).__name__} is not supported; take DynamicCache,"
            " which generate does without cache_implementation"
        )
    if mask is not None and mask.dim() != 2:
        raise NotImplementedError(
            f"generation = 'exact': attention_mask must be (batch, length), got {tuple(mask.shape)}"
        )
    places = arguments.get("position_ids")
    if places is None and mask is not None:
        given = next(arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
        places = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -given.shape[1] :]
    arguments["position_ids"] = places


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exact_one = _FUNCTIONS.get(func)
        if exact_one is None:
            return func(*args, **(kwargs or {}))
        return exact_one(func, *args, **(kwargs or {}))


def _linear(func: Any, rows: T, weight: T, bias: T | None = None) -> T:
    outputs, columns = weight.shape

    def probe(rows: T) -> T:
        return F.linear(rows, cancelling((outputs, columns), rows.dtype, rows.device, signed=False))

    flat = rows.reshape(-1, columns)
    if not weight.is_contiguous():
        weight = weight.contiguous()
    found = by_rows(flat, lambda rows: F.linear(rows, weight), "a product by a weight", outputs, probe=probe)
    found = found.view(*rows.shape[:-1], outputs)
    return found if bias is None else found + bias


def _of_rows(func: Any, values: T, *args: Any, **options: Any) -> Any:
    """Apply a function that has one result for what is along the last dim, or elements of a row."""
    dim = options.get("dim", args[0] if args else None)
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or dim not in (-1, values.dim() - 1) or not values.is_floating_point():
        return func(values, *args, **options)
    kept = func in _KEEPING or bool(options.get("keepdim", args[1] if len(args) > 1 else False))
    options = {name: value for name, value in options.items() if name in ("dtype",) and value is not None}
    if func not in _KEEPING:
        options["keepdim"] = True
    name = getattr(func, "__name__", str(func))
    dtype = options.pop("dtype", values.dtype)
    flat = values.reshape(-1, values.shape[-1])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    found = by_rows(flat, lambda rows: func(rows, dim=-1, **options), name).to(dtype)
    found = found.view(*values.shape[:-1], found.shape[-1])
    return found if kept else found.squeeze(-1)


def _of_elements(func: Any, values: T, *args: Any, **options: Any) -> T:
    return elementwise(values, lambda each: func(each, *args, **options))


def _refuse(func: Any, *args: Any, **options: Any) -> Any:
    shapes = [tuple(each.shape) for each in args if isinstance(each, T)]
    if len(shapes) == 2 and shapes[0][-1:] == (1,) and shapes[1][-2:-1] == (1,):
        return func(*args, **options)  # of columns by rows: no sums
    raise NotImplementedError(
        f"generation = 'exact': the model calls {getattr(func, '__name__', func)} of {shapes}, which is not known to be"
        f" exact; {_LEAVE}"
    )


_KEEPING = {torch.softmax, T.softmax, F.softmax, torch.log_softmax, T.log_softmax, F.log_softmax}
_SUMS = {torch.mean, T.mean, torch.sum, T.sum, torch.logsumexp, T.logsumexp}
_ELEMENTS = {F.silu, F.gelu, torch.sigmoid, T.sigmoid, F.sigmoid, torch.tanh, T.tanh, F.tanh, torch.exp, T.exp}
_ELEMENTS |= {torch.cos, T.cos, torch.sin, T.sin, torch.rsqrt, T.rsqrt}
_PRODUCTS = {torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm, torch.addmm, T.addmm}
_PRODUCTS |= {torch.baddbmm, T.baddbmm, torch.einsum, F.conv1d, F.conv2d, F.scaled_dot_product_attention}
_PRODUCTS |= {F.bilinear, F.rms_norm, F.layer_norm, F.group_norm, torch.cumsum, T.cumsum, torch.cumprod, T.cumprod}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys(_KEEPING | _SUMS, _of_rows),
    **dict.fromkeys(_ELEMENTS, _of_elements),
    **dict.fromkeys(_PRODUCTS, _refuse),
}
