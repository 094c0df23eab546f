"""Memory that the ranks of a host share, collectives over it, and wires between hosts.

Installing the package is enough: hp-platform's collectives of CPU tensors then go through shared memory where all ranks
of a group are on one host. `core_name` tells by which core, and the environment variable
`HYPER_PARALLEL_TRANSPORT=backend` turns it off. `Wire` sends the summands of a reduction in fewer bytes.
`gathered_linear` and `scattered_linear` are linear layers with a collective under their product.
"""

from hp_onesided.cores.core import core_name
from hp_onesided.fused import choose, gathered_linear, scattered_linear
from hp_onesided.memory.signals import Signal
from hp_onesided.memory.symmetric import SymmetricMemory
from hp_onesided.wire import Wire, all_reduce, bound, reduce_scatter

__all__ = [
    "Signal",
    "SymmetricMemory",
    "Wire",
    "all_reduce",
    "bound",
    "choose",
    "core_name",
    "gathered_linear",
    "reduce_scatter",
    "scattered_linear",
]
