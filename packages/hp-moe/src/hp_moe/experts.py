"""What experts compute: grouped products and what is between them, for transformers' modules and ours alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_moe.port import port

__all__ = ["Description", "compute", "describe"]

Tensor = Any


@dataclass(frozen=True)
class Description:
    """A module of experts.

    Attributes:
        name: of its class, for errors.
        experts: their number.
        features: between the two products of an expert.
        first: the weight of the first product, or its two weights, of the gate and of what it is multiplied with.
        second: the weight of the second product.
        biased: each weight has a bias, called as it is with ``_bias``.
        packed: the first product's one weight holds gate and up projection, one after the other.
        transposed: weights are ``[experts, in, out]``.
        swiglu: ``silu(gate) * up`` is all between the two products.
        kernel: take one kernel for all experts' products, where the framework has it.
    """

    name: str
    experts: int
    features: int
    first: tuple[str, ...]
    second: str
    biased: bool
    packed: bool
    transposed: bool
    swiglu: bool
    kernel: bool = True

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
        TypeError: a module without weights of three dims.
    """
    gated = bool(getattr(module, "has_gate", True))
    own = hasattr(module, "w1")
    first, second = (("w1", "w3"), "w2") if own else (("gate_up_proj",) if gated else ("up_proj",), "down_proj")
    for name in (*first, second):
        weight = getattr(module, name, None)
        if not port().is_weight(weight):
            got = "none" if weight is None else f"one of shape {tuple(getattr(weight, 'shape', ()))}"
            raise TypeError(
                f"{type(module).__name__} is not a module of experts: {name} must be a parameter [experts, out, in],"
                f" got {got}. Name the module that has gate_up_proj (or up_proj, with has_gate = False) and down_proj."
            )
    transposed = bool(getattr(module, "is_transposed", False))
    down = getattr(module, second)
    packed = gated and not own and bool(getattr(module, "is_concatenated", True))
    return Description(
        type(module).__name__,
        down.shape[0],
        down.shape[1 if transposed else 2],
        first,
        second,
        bool(getattr(module, "has_bias", False)),
        packed,
        transposed,
        own or (packed and port().is_swiglu(module)),
        bool(getattr(module, "use_grouped_mm", True)),
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
    within = weights if norm is None else None
    out = _linear(_between(module, own, inner, within), own, own.second, sizes, part, within)
    if norm is None:
        return out
    return norm(out) if weights is None else norm(out) * weights


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
    out = port().grouped(port().cast(rows, weight), weight, sizes, own.transposed, own.kernel)
    if not own.biased:
        return out
    bias = port().repeated(part(f"{name}_bias"), sizes)
    return out + (bias if weights is None else bias * weights)
