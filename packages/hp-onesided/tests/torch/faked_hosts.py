"""Ranks of this machine that name networks of several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hp_onesided import opening
from hp_platform import get_platform
from hp_platform.extend import own_rank
from hp_platform.torch import peers


def fake_hosts(patch: pytest.MonkeyPatch, hosts: Sequence[int]) -> None:
    """Let ranks say that they are on several hosts, on all ranks alike, until the patch is undone.

    Args:
        patch: undoes it.
        hosts: the number of the host of each rank of the world.
    """
    patch.setattr(peers, "networks", lambda ranks: [f"host {hosts[rank]}" for rank in ranks])
    patch.setattr(opening, "own_network", lambda: f"host {hosts[own_rank()]}")


def group_of(ranks: Sequence[int]) -> Any:
    """Make a group of those hosts; ranks outside of it get None."""
    return get_platform().groups.second_group(ranks) if own_rank() in ranks else None
