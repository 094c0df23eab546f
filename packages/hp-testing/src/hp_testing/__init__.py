"""Ranks for tests: a pool of processes for each world size, kept warm over a session.

`run_ranks` runs a function on every rank, `on_ranks` a pytest test. The pytest plugin is
`hp_testing.plugin`; its option `--backend` chooses the framework and the device.
"""

from __future__ import annotations

from hp_testing.figures import note_figure
from hp_testing.pools.pool import RankError, close_pools, on_ranks, run_ranks
from hp_testing.pools.target import as_array, as_tensor, device_type

__all__ = ["RankError", "as_array", "as_tensor", "close_pools", "device_type", "note_figure", "on_ranks", "run_ranks"]
