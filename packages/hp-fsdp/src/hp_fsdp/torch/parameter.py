"""ManagedParameter: one parameter of a group, sharded and unsharded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from hp_dtensor.spec import TensorSpec
from hp_dtensor.torch.dtensor import DTensor, wrap
from hp_fsdp import finding

__all__ = ["ManagedParameter", "find_parameters", "has_own_setattr"]

_plain = torch._C.DisableTorchFunctionSubclass
_module_setattr = nn.Module.__setattr__
_OWN_ATTRIBUTES = ("_spec", "_is_param", "_moved_from", "_hsdp_in_blocks", "_hsdp_owner")


class ManagedParameter:
    """A parameter, where it is registered, and the two tensors that stand there in turn.

    Attributes:
        name: its name inside the group's module.
        original: the parameter as it was found; None once it is sharded.
        shape: shape of the unsharded tensor on this rank.
        inner: the unsharded tensor's layout where it is a DTensor (tensor parallel), else None.
        trains: whether it requires gradients.
        sharded: what the user and the optimizer see: a DTensor, locally a run of elements of the rank's flat shard.
        unsharded: what forward and backward use: a leaf that looks into the gathered buffer.
    """

    __slots__ = ("inner", "name", "original", "places", "shape", "sharded", "trains", "unsharded")

    def __init__(self, name: str, original: nn.Parameter) -> None:
        self.name = name
        self.original: nn.Parameter | None = original
        self.inner: TensorSpec | None = original._spec if isinstance(original, DTensor) else None
        with _plain():
            self.shape = torch.Size(original.shape)
        self.trains = bool(original.requires_grad)
        self.places: list[tuple[nn.Module, str]] = []
        self.sharded: Any = None
        self.unsharded: Any = None

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded tensor on this rank."""
        return self.shape.numel()

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape that the user sees."""
        return tuple(self.shape) if self.inner is None else self.inner.shape

    def flat(self) -> torch.Tensor:
        """The original's elements in one dim, as a plain tensor."""
        assert self.original is not None
        with torch.no_grad(), _plain():
            return torch.Tensor.detach(self.original).reshape(-1)

    def make_sharded(self, view: torch.Tensor, spec: TensorSpec, owner: str) -> None:
        """Makes the sharded parameter over ``view``, a part of the flat shard, and forgets the original.

        Args:
            view: the rank's run of elements, 1-d.
            spec: the sharded parameter's layout.
            owner: text for the error where another group finds this parameter, too.
        """
        self.sharded = _leaf(view, spec, self.trains)
        _copy_attributes(self.original, self.sharded)
        # Whoever finds one of the two registered elsewhere knows that it has an owner, see `find_parameters`.
        self.original._hsdp_owner = self.sharded._hsdp_owner = owner  # type: ignore[union-attr]
        self.original = None

    def renew_sharded(self, view: torch.Tensor) -> None:
        """Makes the sharded parameter anew over ``view``."""
        former = self.sharded
        self.sharded = _leaf(view, former._spec, self.trains)
        _copy_attributes(former, self.sharded)
        self.sharded._hsdp_owner = former._hsdp_owner

    def make_unsharded(self, view: torch.Tensor) -> None:
        """Makes the unsharded parameter over ``view``, which is a part of the gathered buffer."""
        self.unsharded = _leaf(view.view(self.shape), self.inner, self.trains)
        _copy_attributes(self.sharded, self.unsharded)


def has_own_setattr(module: nn.Module) -> bool:
    """Whether a module does more than to store a parameter that is set on it (RNNs do)."""
    return type(module).__setattr__ is not _module_setattr


def _leaf(view: torch.Tensor, spec: TensorSpec | None, trains: bool) -> torch.Tensor:
    # A detached view shares storage and version counter with the buffer, and is a leaf whatever the buffer is.
    view = view.detach()
    if spec is None:
        return nn.Parameter(view, requires_grad=trains)
    made = wrap(view, spec)
    made._is_param = True  # type: ignore[attr-defined]
    with _plain():
        made.requires_grad_(trains)
    return made


def _copy_attributes(source: Any, target: Any) -> None:
    """Marks that a model or user hung on a parameter (no weight decay, an initialised flag) stay on it."""
    for key, value in source.__dict__.items():
        if key not in _OWN_ATTRIBUTES:
            target.__dict__[key] = value


def find_parameters(module: nn.Module, ignored: Collection[nn.Parameter], stop: type) -> list[ManagedParameter]:
    """The parameters of ``module`` that no inner group has; see `hp_fsdp.finding`."""
    return finding.find_parameters(
        module, ignored, stop, ManagedParameter, parameters="_parameters", children="_modules"
    )
