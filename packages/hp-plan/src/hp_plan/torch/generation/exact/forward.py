"""A model whose whole forward, in training and in generation, is exact.

Note [Above autograd]
    Inside of a module's forward a mode sees each call of a function of torch. Products by weights, and sums and norms
    of a row, go by `rows.by_rows`, functions of elements by `rows.elementwise`, and both call torch's own functions, so
    gradients flow as always. Products that are not known to be exact are refused by their name. Each module enters the
    mode by itself, not the model alone: a module that is computed again in a backward is exact there, too. A mode costs
    some microseconds a call, so a module whose own code called nothing that needs it in its first forward goes without.
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
_LEAVE = "leave run.generation out"
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)  # the last for `verify`
_MARK = "_exact_forward"


class _Here(threading.local):
    """What runs in this thread: whether the mode is on, and the module whose own code runs."""

    on: bool = False
    running: _Within | None = None


_here = _Here()


def make_exact(model: nn.Module) -> None:
    """Let the forward of a causal language model of transformers be exact, in training and in generation.

    Raises:
        NotImplementedError: what is not exact here.
    """
    config: Any = model.config
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise NotImplementedError(f"generation = 'exact': {name} drops out with p = {module.p:g}; {_LEAVE}")
    other = next((name for name, each in model.named_parameters() if each.dtype not in _DTYPES), None)
    if other is not None:
        raise NotImplementedError(
            f"generation = 'exact': {other} is {model.get_parameter(other).dtype}; build the model in float32 or"
            f" bfloat16 (run.dtype), or {_LEAVE}"
        )
    attention.register()
    owner: Any = model
    owner.set_attn_implementation(attention.NAME)
    if hasattr(config, "_experts_implementation"):
        owner.set_experts_implementation("eager")  # one expert after the other, whose sums have their order
    for module in model.modules():
        module.forward = _Within(module, _check_call if module is model else None)
        setattr(module, _MARK, True)


def is_exact(model: nn.Module) -> bool:
    """Return True for a model that `make_exact` has changed, or one around it."""
    return any(map(_has_own, model.modules()))


def _has_own(module: nn.Module) -> bool:
    return _MARK in vars(module)  # what computes a module again wraps its forward once more


def refuse_later_modules(model: nn.Module) -> None:
    """Refuse modules that joined the model after `make_exact`, whose forwards are their own."""
    later = next((name for name, module in model.named_modules() if not _has_own(module)), None)
    if later is not None:
        raise NotImplementedError(
            f"generation = 'exact': {later or 'what is around the model'} joined the model after apply, and is not"
            f" exact; leave it out, or {_LEAVE}"
        )


@contextlib.contextmanager
def exact(on: bool = True) -> Iterator[None]:
    """Inside, what torch computes of rows is exact, unless it is off."""
    if not on or _here.on:
        yield
        return
    _here.on = True
    try:
        with _Mode():
            yield
    finally:
        _here.on = False


class _Within:
    """A module's forward, inside of the mode where its own code needs it.

    Args:
        module: whose forward it is.
        check: of the model's arguments, by name.
    """

    def __init__(self, module: nn.Module, check: Callable[[dict[str, Any]], None] | None) -> None:
        inner = module.forward
        functools.update_wrapper(self, inner)
        self._module, self._inner, self._check = module, inner, check
        self._linear = type(module) is nn.Linear
        self._names = [*inspect.signature(inner).parameters] if check is not None else []
        self._needed: dict[bool, bool] = {}  # in training and in evaluation
        self.calls = False

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._check is None:
            return self._run(args, options)
        if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            what = "torch.autocast" if torch.is_autocast_enabled("cpu") else "torch.compile"
            raise NotImplementedError(f"generation = 'exact': {what} is not supported; {_LEAVE}")
        arguments = dict(zip(self._names, args)) | options
        self._check(arguments)
        if "position_ids" not in self._names[: len(args)]:
            options = {**options, "position_ids": arguments["position_ids"]}
        with attention.known_blocks():
            return self._run(args, options)

    def _run(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        module: Any = self._module
        if self._linear and not _here.on:
            return linear(args[0] if args else options["input"], module.weight, module.bias)
        training = module.training
        needed = self._needed.get(training)
        if needed is False:
            return self._inner(*args, **options)
        outer, _here.running = _here.running, self
        try:
            if _here.on:
                result = self._inner(*args, **options)
            else:
                with exact():
                    result = self._inner(*args, **options)
            if needed is None:
                self._needed[training] = self.calls
            return result
        finally:
            _here.running = outer


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
    if mask is not None and bool(((mask[:, 1:] > mask[:, :-1]).sum(1) + (mask[:, 0] > 0) > 1).any()):
        raise NotImplementedError(
            "generation = 'exact': attention_mask has padding between tokens of a text, which moves those after it; pad"
            " prompts on the left (padding_side = 'left' of a tokenizer)"
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
        if _here.running is not None:
            _here.running.calls = True
        return exact_one(func, *args, **(kwargs or {}))


def _linear(func: Any, rows: T, weight: T, bias: T | None = None) -> T:
    return linear(rows, weight, bias)


def linear(rows: T, weight: T, bias: T | None = None) -> T:
    """Multiply (..., columns) by a weight of (outputs, columns): a row has the same bits beside any others."""
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


def _root(func: Any, values: T) -> T:
    if values.dtype in (torch.float32, torch.float64):  # a root and a quotient, each rounded once wherever it stands
        return func(values)
    return elementwise(values, func)


def _refuse(func: Any, *args: Any, **options: Any) -> Any:
    tensors = [each for each in args if isinstance(each, T)]
    if not any(each.is_floating_point() for each in tensors):
        return func(*args, **options)  # integers have no rounding
    shapes = [tuple(each.shape) for each in tensors]
    if len(shapes) == 2 and shapes[0][-1:] == (1,) and shapes[1][-2:-1] == (1,):
        return func(*args, **options)  # of columns by rows: no sums
    raise NotImplementedError(
        f"generation = 'exact': the model calls {getattr(func, '__name__', func)} of {shapes}, which is not known to be"
        f" exact; {_LEAVE}"
    )


_KEEPING = {torch.softmax, T.softmax, F.softmax, torch.log_softmax, T.log_softmax, F.log_softmax}
_SUMS = {torch.mean, T.mean, torch.sum, T.sum, torch.logsumexp, T.logsumexp}
_ELEMENTS = {F.silu, F.gelu, torch.sigmoid, T.sigmoid, F.sigmoid, torch.tanh, T.tanh, F.tanh, torch.exp, T.exp}
_ELEMENTS |= {torch.cos, T.cos, torch.sin, T.sin}
_ROOTS = {torch.rsqrt, T.rsqrt}
_PRODUCTS = {torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm, torch.addmm, T.addmm}
_PRODUCTS |= {torch.baddbmm, T.baddbmm, torch.einsum, F.conv1d, F.conv2d, F.scaled_dot_product_attention}
_PRODUCTS |= {F.bilinear, F.rms_norm, F.layer_norm, F.group_norm, torch.cumsum, T.cumsum, torch.cumprod, T.cumprod}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys(_KEEPING | _SUMS, _of_rows),
    **dict.fromkeys(_ELEMENTS, _of_elements),
    **dict.fromkeys(_ROOTS, _root),
    **dict.fromkeys(_PRODUCTS, _refuse),
}
