"""What experts compute: grouped products and what is between them, for transformers' modules and ours alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_moe.port import port

Tensor = Any


@dataclass(frozen=True)
class Description:
    """A module of experts.

    Attributes:
        name: in its model and of its class, for errors.
        experts: their number.
        hidden: size of tokens.
        features: between the two products of an expert.
        first: the weight of the first product, or its two weights, of the gate and of what it is multiplied with.
        second: the weight of the second product.
        biased: each weight has a bias, called as it is with ``_bias``.
        packed: the first product's one weight holds gate and up projection, one after the other.
        transposed: weights are ``[experts, in, out]``.
        swiglu: ``silu(gate) * up`` is all between the two products.
        kernel: take one kernel for all experts' products, where the framework has it.
        product: called with rows, a weight, rows of each expert and `transposed`, in place of the framework's product:
            the module's ``grouped_product``. What a result is multiplied by is none of what it casts.
    """

    name: str
    experts: int
    hidden: int
    features: int
    first: tuple[str, ...]
    second: str
    biased: bool
    packed: bool
    transposed: bool
    swiglu: bool
    kernel: bool = True
    product: Callable[[Tensor, Tensor, Sequence[int], bool], Tensor] | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        """List the weights."""
        return (*self.first, self.second)

    @property
    def parameters(self) -> tuple[str, ...]:
        """List the parameters with one entry an expert."""
        return self.weights + (tuple(f"{name}_bias" for name in self.weights) if self.biased else ())


def describe(module: Any) -> Description:
    """Describe a module of experts, by what transformers' modules say of themselves.

    Raises:
        TypeError: a module without weights of three dims, or with some that do not fit each other.
    """
    kind, name_in_model = type(module).__name__, getattr(module, "_name_in_model", "")
    called = f"{name_in_model} ({kind})" if name_in_model else kind
    gated = bool(getattr(module, "has_gate", True))
    own = hasattr(module, "w1")
    first, second = (("w1", "w3"), "w2") if own else (("gate_up_proj",) if gated else ("up_proj",), "down_proj")
    for name in (*first, second):
        weight = getattr(module, name, None)
        if not port().is_weight(weight):
            got = "none" if weight is None else f"one of shape {tuple(getattr(weight, 'shape', ()))}"
            raise TypeError(
                f"{called} is not a module of experts: {name} must be a parameter [experts, out, in],"
                f" got {got}. Name the module that has gate_up_proj (or up_proj, with has_gate = False) and down_proj."
            )
    transposed = bool(getattr(module, "is_transposed", False))
    down = getattr(module, second)
    packed = gated and not own and bool(getattr(module, "is_concatenated", True))
    hidden = down.shape[2 if transposed else 1]
    for name in first:
        shape = tuple(getattr(module, name).shape)
        if shape[0] != down.shape[0] or shape[1 if transposed else 2] != hidden:
            raise TypeError(
                f"{called}: {name} of shape {shape} and {second} of shape {tuple(down.shape)} are not the weights"
                f" {'[experts, in, out]' if transposed else '[experts, out, in]'} of the same experts. Set the module's"
                " is_transposed as they are."
            )
    return Description(
        called,
        down.shape[0],
        hidden,
        down.shape[1 if transposed else 2],
        first,
        second,
        bool(getattr(module, "has_bias", False)),
        packed,
        transposed,
        own or (packed and port().is_swiglu(module)),
        bool(getattr(module, "use_grouped_mm", True)),
        getattr(module, "grouped_product", None),
    )


def check_module(own: Description, module: Any) -> None:
    """Refuse modules whose calls an ``ExpertLayer`` cannot take over.

    Raises:
        TypeError: it is called with something else than tokens, choices and weights (as Llama 4's, whose tokens are
            scaled before), or has no activation.
        ValueError: transformers has spread its experts over ranks.
    """
    call = inspect.signature(getattr(module, "construct", None) or module.forward)
    try:
        call.bind(None, None, None)
    except TypeError:
        raise TypeError(
            f"{own.name} is called with {call}; experts over ranks are called with tokens, the experts chosen for each,"
            " and their weights. Write a module of experts with these arguments"
        ) from None
    activation = "_apply_gate" if getattr(module, "has_gate", True) else "act_fn"
    if len(own.first) == 1 and not callable(getattr(module, activation, None)):
        raise TypeError(f"{own.name} has no {activation}, which computes what is between its two products: define it")
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(
            f"{own.name}: transformers has spread these experts over ranks already; load the model without an ep_size"
            " in its distributed_config"
        )


def compute(
    module: Any,
    own: Description,
    rows: Tensor,
    sizes: Sequence[int],
    part: Callable[[str], Tensor],
    weights: Tensor | None = None,
) -> Tensor:
    """Compute rows by their experts.

    Args:
        module: of experts.
        own: its description.
        rows: ``[rows, hidden]``, ordered by expert.
        sizes: rows of each expert that is computed here.
        part: returns the part of a parameter that is computed here.
        weights: ``[rows, 1]``, what results are multiplied by, None for nothing. What goes into the second product is,
            which is linear: the features inside are fewer, and no result has to be saved.

    Returns:
        ``[rows, hidden]``.
    """
    inner = [_linear(rows, own, name, sizes, part) for name in own.first]
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    within = weights if norm is None and own.product is None else None
    out = _linear(_between(module, own, inner, within), own, own.second, sizes, part, within)
    out = out if norm is None else norm(out)
    return out if weights is within else out * weights


def _between(module: Any, own: Description, inner: Sequence[Tensor], weights: Tensor | None) -> Tensor:
    """Compute what is between an expert's two products, times weights; backward computes it again."""
    if own.swiglu:
        return port().swiglu(inner, weights)
    gate = module._apply_gate if getattr(module, "has_gate", True) else module.act_fn
    if weights is None:
        return port().recomputed(gate, *inner)
    return port().recomputed(lambda *values: gate(*values[:-1]) * values[-1], *inner, weights)


def _linear(
    rows: Tensor,
    own: Description,
    name: str,
    sizes: Sequence[int],
    part: Callable[[str], Tensor],
    weights: Tensor | None = None,
) -> Tensor:
    weight = part(name)
    rows = port().cast(rows, weight)
    if own.product is None:
        out = port().grouped(rows, weight, sizes, own.transposed, own.kernel)
    else:
        out = own.product(rows, weight, sizes, own.transposed)
    if not own.biased:
        return out
    bias = port().repeated(part(f"{name}_bias"), sizes)
    return out + (bias if weights is None else bias * weights)
