"""Names for MindSpore that other packages of this repository may import, in addition to the public ones."""

from __future__ import annotations

from hp_dtensor.creation.creation import distribute_tensor
from hp_dtensor.mindspore.api import distribute_parameter, named_parameters, replicate_parameters
from hp_dtensor.mindspore.backward import autograd
from hp_dtensor.mindspore.backward.autograd import (
    alias,
    execute,
    grad_enabled,
    local_mode,
    once_differentiable,
    own_dtypes,
)
from hp_dtensor.mindspore.dtensor import DTensor, local_view, redistribute, redistribute_shared, unwrap, wrap
from hp_dtensor.mindspore.modules import named_modules, set_local, states_by_name

__all__ = [
    "DTensor",
    "alias",
    "autograd",
    "distribute_parameter",
    "distribute_tensor",
    "execute",
    "grad_enabled",
    "local_mode",
    "local_view",
    "named_modules",
    "named_parameters",
    "once_differentiable",
    "own_dtypes",
    "redistribute",
    "redistribute_shared",
    "replicate_parameters",
    "set_local",
    "states_by_name",
    "unwrap",
    "wrap",
]
