"""What optimizers are given beside sharded parameters, looked at before their first step.

Note [Before an optimizer's first step]
    A block can't see that the model around it was not sharded; the optimizer has the parameters of both. Those that no
    group has would be trained on each rank's own gradients, and drift apart without a word. So from the first call of
    `fully_shard` on all optimizers are looked at before their first step. It costs one look-up a step, once the
    parameters were found in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from hp_fsdp.finding import owner_of
from hp_fsdp.norms import spec_of

__all__ = ["ignore", "refuse_unreduced", "unreduced"]


def ignore(parameter: Any) -> None:
    """Notes on a parameter that the user reduces its gradients themselves."""
    parameter._hsdp_ignored = True


def unreduced(parameters: Sequence[Any]) -> list[Any]:
    """The parameters of an optimizer whose gradients nobody reduces, though there are sharded ones beside them."""
    meshes = {each._spec.mesh for each in parameters if owner_of(each) is not None}
    if all(mesh.size() == 1 for mesh in meshes):
        return []
    return [each for each in parameters if owner_of(each) is None and each.requires_grad and not _settled(each, meshes)]


def refuse_unreduced(wrong: Sequence[Any], count: int, name: str) -> NoReturn:
    """Refuses a step that would let ranks drift apart.

    Args:
        wrong: some of what `unreduced` gave.
        count: number of the optimizer's parameters.
        name: its class.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"fully_shard: {len(wrong)} of the {count} parameters of {name} are in no sharded module (the first of shape"
        f" {tuple(wrong[0].shape)}), so their gradients are each rank's own and the ranks would drift apart. Call"
        " fully_shard on the model itself, too, after its blocks; if you reduce these gradients yourself, pass the"
        " parameters in ignored_params"
    )


def _settled(parameter: Any, meshes: set[Any]) -> bool:
    """True for a parameter that is reduced elsewhere: by the user, or as a DTensor over the same ranks."""
    spec = spec_of(parameter)
    return getattr(parameter, "_hsdp_ignored", False) or (spec is not None and spec.mesh in meshes)
