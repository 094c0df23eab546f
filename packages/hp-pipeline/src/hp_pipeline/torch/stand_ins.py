"""Modules without parameters, in the place of what other stages run: Note [How a model is split]."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

T = torch.Tensor

Form = Callable[[T, Any], Any]
FORMS: tuple[Form, ...] = (lambda hidden, rest: hidden, lambda hidden, rest: (hidden,), lambda *both: both)
"""What a block returns: its hidden states, or a tuple of them, or a pair."""


class Relay:
    """The hidden states of the forward under way.

    Attributes:
        received: from the stage before.
        sent: what the last block of the stage returned.
    """

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.received: T | None = None
        self.sent: T | None = None

    def blank(self, *shape: int) -> T:
        """Return zeros of a shape that take the memory of one element."""
        hidden = self.sent if self.sent is not None else self.received
        assert hidden is not None, "stand-ins run in a stage's forward"
        return hidden.detach().new_zeros(()).expand(shape)

    def clear(self) -> None:
        """Forget the hidden states."""
        self.received = self.sent = None


class PassThrough(nn.Module):
    """A block of another stage.

    Args:
        block: the block; its plain attributes are the stand-in's, for models read some.
        relay: of the stage.
        form: one of ``FORMS``.
        role: ``"inject"`` returns what the stage received; ``"capture"`` keeps what it gets, and returns zeros.
    """

    def __init__(self, block: nn.Module, relay: Relay, form: Form, role: str = "") -> None:
        super().__init__()
        vars(self).update(_plain(block))
        self.relay, self.form, self.role = relay, form, role

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = args[0] if args else kwargs["hidden_states"]
        if self.role == "capture":
            self.relay.sent = hidden
            hidden = self.relay.blank(*hidden.shape)
        elif self.role == "inject":
            hidden = self.relay.received
        return self.form(hidden, None)


class _Placeholder(nn.Module):
    """A module that is not a block: returns the first tensor of numbers, or zeros for a tensor of indices.

    Args:
        relay: of the stage.
        features: the size of the last dim of zeros in place of the numbers.
        embeds: what it gets are indices, of any dtype.
    """

    def __init__(self, relay: Relay, features: int | None, embeds: bool) -> None:
        super().__init__()
        self.relay, self.features, self.embeds = relay, features, embeds

    @property
    def weight(self) -> T:
        """A tensor of the hidden states' dtype, which models read in a forward."""
        if self.relay.received is None and self.relay.sent is None:
            raise AttributeError("weight")
        return self.relay.blank()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, T)]
        numbers = [each for each in tensors if each.is_floating_point()]
        if numbers and not self.embeds:
            whole = numbers[0]
            return whole if self.features is None else self.relay.blank(*whole.shape[:-1], self.features)
        assert self.relay.received is not None, "the first stage has its own embeddings"
        return self.relay.blank(*(tensors[0].shape if tensors else ()), self.relay.received.shape[-1])


def placeholder(module: nn.Module, relay: Relay, ahead: bool) -> nn.Module:
    """Return a stand-in for a module that is not a block; ``ahead`` if it runs before the blocks."""
    features = module.out_features if isinstance(module, nn.Linear) and not ahead else None
    return _Placeholder(relay, features, isinstance(module, nn.Embedding))


def copied(module: nn.Module) -> Any:
    """Copy a module without what is in it: the parameters, buffers and children are the same objects."""
    clone = object.__new__(type(module))
    own = vars(nn.Module())
    for name, value in vars(module).items():
        vars(clone)[name] = copy.copy(value) if name in own and isinstance(value, (dict, set)) else value
    return clone


def without_parameters(module: nn.Module) -> Any:
    """Copy a module that has no parameters, and all in it: each stage has its own buffers."""
    clone = copied(module)
    for name, child in module._modules.items():
        clone._modules[name] = None if child is None else without_parameters(child)
    return clone


def _plain(module: nn.Module) -> dict[str, Any]:
    kinds = (bool, int, float, str, tuple, type(None))
    return {
        name: value for name, value in vars(module).items() if not name.startswith("_") and isinstance(value, kinds)
    }
