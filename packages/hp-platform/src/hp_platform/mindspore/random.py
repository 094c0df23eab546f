"""MindSpore's random generators.

Note [Two kinds of generators]: the operators of `mint` draw from a default generator, whose state is a tensor. Those of
`ops` (on the CPU the only ones with kernels) and the initializers derive their numbers from a global seed and from how
often each kind of operator was called. A state here is both, so that what it is given back to draws the same again.
"""

from __future__ import annotations

import importlib
from typing import Any

import mindspore

_seeds: Any = importlib.import_module("mindspore.common.seed")  # the package has a function of that name


def seed(seed: int) -> None:
    """Seed every generator; NumPy's, which MindSpore seeds as well, takes no more than 32 bits."""
    mindspore.set_seed(seed % 2**32)
    mindspore.manual_seed(seed % 2**63)


def get_state(device: Any) -> Any:
    """Get the state of the generators; MindSpore has one for all devices."""
    return mindspore.get_rng_state(), _seeds.get_seed(), dict(_seeds._KERNEL_SEED)


def set_state(device: Any, state: Any) -> None:
    """Set the state of the generators to what `get_state` gave."""
    generator, global_seed, calls = state
    mindspore.set_rng_state(generator)
    _seeds._GLOBAL_SEED = global_seed
    _seeds._KERNEL_SEED.clear()
    _seeds._KERNEL_SEED.update(calls)
