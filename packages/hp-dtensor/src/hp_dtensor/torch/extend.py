"""Names for PyTorch that other packages of this repository may import, in addition to the public ones."""

from __future__ import annotations

from hp_dtensor.torch.api import (
    become,
    distribute_parameter,
    named_modules,
    named_parameters,
    refuse_foreign,
    replicate_parameters,
)
from hp_dtensor.torch.backward.autograd import arriving_gradients, grad_spec, reduce_partial_grads
from hp_dtensor.torch.backward.engine import Mark, backward, explaining, marks, will_run
from hp_dtensor.torch.compile.compiling import encode_placements, traces_as
from hp_dtensor.torch.compile.graph import constant, decode_placements, mesh_of
from hp_dtensor.torch.dtensor import DTensor, local_view, redistribute, redistribute_shared, wrap
from hp_dtensor.torch.modules import Modules, give_memory, materialize
from hp_dtensor.torch.moves.redistribute import execute
from hp_dtensor.torch.ops.parallel_loss import sharded_loss
from hp_dtensor.torch.ops.random import compare_generators

__all__ = [
    "DTensor",
    "Mark",
    "Modules",
    "arriving_gradients",
    "backward",
    "become",
    "compare_generators",
    "constant",
    "distribute_parameter",
    "execute",
    "explaining",
    "give_memory",
    "grad_spec",
    "local_view",
    "marks",
    "materialize",
    "mesh_of",
    "named_modules",
    "named_parameters",
    "decode_placements",
    "redistribute",
    "redistribute_shared",
    "reduce_partial_grads",
    "refuse_foreign",
    "replicate_parameters",
    "sharded_loss",
    "encode_placements",
    "traces_as",
    "will_run",
    "wrap",
]
