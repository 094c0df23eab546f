"""Memory that the ranks of a host share, and collectives over it.

Installing the package is enough: hp-platform's collectives of CPU tensors then go through shared memory where all ranks
of a group are on one host. `core_name` tells by which core, and the environment variable
`HYPER_PARALLEL_TRANSPORT=backend` turns it off.
"""

from hp_onesided.cores.core import core_name

__all__ = ["core_name"]
