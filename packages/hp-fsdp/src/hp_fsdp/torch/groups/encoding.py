"""Encoding: what the all-gather extension of a tensor subclass makes of a parameter's rows, and of the gathered ones.

Note [Encoded parameters]
    A tensor subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, the protocol of torch's FSDP2, says
    which bytes of its rows travel, and which tensor the gathered bytes are. It wraps one plain tensor, which is what is
    sharded: optimizer, checkpoints and gradients see plain shards, as of any parameter. Only while a group is gathered
    is there an instance of the subclass, around this rank's rows, and the tensor that ``fsdp_post_all_gather`` made.

    Ranks hold whole rows, some ranks fewer than others or none. Each tensor that is gathered has a row for each row of
    the parameter, so all ranks know how many bytes every rank sends.

    Where one number scales a whole parameter, it must not depend on how the rows are cut. So the largest absolute value
    over all ranks that share the parameter is computed before, of all parameters of a model in one reduction, and
    handed to the instance: to its method ``fsdp_take_amax(amax)``, or as the scale that ``torchao`` keeps in
    ``_precomputed_scale``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_dtensor.extend import gathered_as

_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


@dataclass(frozen=True, slots=True)
class Encoding:
    """A subclass, as it wraps the plain tensor of one parameter.

    Attributes:
        cls: the subclass.
        inner: its attribute that holds the plain tensor.
        context: the rest of what ``__tensor_flatten__`` returned.
    """

    cls: Any
    inner: str
    context: Any

    @staticmethod
    def of(name: str, parameter: torch.Tensor) -> Encoding | None:
        """Return the encoding of a parameter; None for a plain one.

        Args:
            name: the parameter's, for errors.
            parameter: an instance of a subclass with the extension, or one that `gather_as` was called on.

        Raises:
            TypeError: the subclass does not wrap one plain tensor of the parameter's shape and dtype.
        """
        example: Any = gathered_as(parameter)
        cls: Any = type(example)
        if not all(hasattr(cls, method) for method in _METHODS):
            return None
        names, context = example.__tensor_flatten__() if hasattr(cls, "__tensor_flatten__") else ([], None)
        tensors = [getattr(example, each) for each in names]
        if len(tensors) != 1 or tensors[0].shape != example.shape or tensors[0].dtype is not example.dtype:
            held = ", ".join(f"{each}: {tensor.dtype} {list(tensor.shape)}" for each, tensor in zip(names, tensors))
            raise TypeError(
                f"fully_shard: parameter {name!r} is a {cls.__module__}.{cls.__name__} with an all-gather extension,"
                f" and its __tensor_flatten__ names {held or 'no tensors'}; expected one plain tensor of"
                f" {example.dtype} {list(example.shape)}, which is sharded and trained. Leave the parameter out with"
                " ignored_params=[...], or convert the model back to plain parameters before"
            )
        if not example.dim():
            raise TypeError(f"fully_shard: parameter {name!r} has an all-gather extension and no dims, so no rows")
        return Encoding(cls, names[0], context)

    def around(self, plain: torch.Tensor) -> Any:
        """Wrap a plain tensor."""
        return self.cls.__tensor_unflatten__({self.inner: plain}, self.context, plain.shape, plain.stride())

    def wants_amax(self, instance: Any) -> bool:
        """Tell whether an instance takes the largest absolute value of the whole parameter."""
        return hasattr(instance, "fsdp_take_amax") or hasattr(instance, "_precomputed_scale")

    def encode(
        self, name: str, rows: torch.Tensor, amax: torch.Tensor | None, around: tuple[Any, ...]
    ) -> tuple[Any, Sequence[torch.Tensor], Any]:
        """Encode this rank's rows.

        Args:
            name: the parameter's, for errors.
            rows: a plain tensor; of no rows, perhaps.
            amax: the largest absolute value of the whole parameter, if the instance takes it.
            around: arguments of ``fsdp_pre_all_gather``: the mesh; the parameter's size and stride, the module, and the
                policy, which it may leave out.

        Returns:
            The instance, what is to be gathered, and what the instance wants back.

        Raises:
            NotImplementedError: a tensor that is to be gathered has another number of rows.
        """
        instance = self.around(rows)
        if hasattr(instance, "fsdp_take_amax"):
            instance.fsdp_take_amax(amax)
        elif amax is not None:
            utils = importlib.import_module("torchao.float8.float8_utils")
            instance._precomputed_scale = utils.amax_to_scale(amax, instance._dtype)
        extension = instance.fsdp_pre_all_gather
        alone = len(inspect.signature(extension).parameters) == 1
        tensors, metadata = extension(*around[: 1 if alone else None])
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] != rows.shape[0]:
                raise NotImplementedError(
                    f"fully_shard: fsdp_pre_all_gather of {self.cls.__name__} made a tensor of shape"
                    f" {list(tensor.shape)} from {rows.shape[0]} rows of parameter {name!r}; expected one entry along"
                    " dim 0 for each row, as ranks hold different numbers of rows. Return what is of the whole"
                    " parameter as metadata"
                )
        return instance, tensors, metadata


def unwrapped(parameter: Any, encoding: Encoding) -> nn.Parameter:
    """Return a plain parameter with the memory that an instance of the subclass wraps."""
    plain = nn.Parameter(getattr(parameter, encoding.inner).detach(), requires_grad=parameter.requires_grad)
    for key, value in vars(parameter).items():
        if key != encoding.inner and not key.startswith("_"):
            setattr(plain, key, value)
    return plain
