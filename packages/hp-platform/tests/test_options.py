"""Options of process groups reach the backend."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hp_platform import GroupOptions, get_platform
from hp_platform.groups import new_group, split_group
from hp_testing import device_type, npu_sim, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]


def reduce(group) -> None:
    tensor = torch.ones(2, device=device_type())
    get_platform().collectives.all_reduce(tensor, group=group)
    assert tensor.tolist() == [group.size()] * 2


@on_ranks(5)
def test_a_timeout_is_every_backends():
    half = [0, 1, 3] if dist.get_rank() in (0, 1, 3) else [2, 4]  # no other test makes them, without options
    group = new_group(half, GroupOptions(timeout=timedelta(seconds=77)))
    reduce(group)
    assert group._get_backend(torch.device(device_type())).options._timeout == timedelta(seconds=77)
    assert new_group(half, GroupOptions(timeout=timedelta(seconds=77))) is group
    with pytest.raises(ValueError, match=r"but the group of ranks \(.*\) already exists, created with GroupO"):
        new_group(half, GroupOptions(timeout=timedelta(seconds=1)))
    with pytest.raises(ValueError, match=r"the group of ranks \(0, 1, 2, 3, 4\) already exists, created with None"):
        new_group(range(5), GroupOptions(timeout=timedelta(seconds=1)))


@on_ranks(5)
def test_hccl_gets_what_was_asked():
    uneven = [[0, 2, 3], [1, 4]]  # no other test makes them: options are for the call that makes a group
    options = GroupOptions(buffer_size=64, high_priority=True)
    if device_type() != "npu":
        with pytest.raises(ValueError, match="buffer_size=64 is an option of hccl; the group's backend is"):
            split_group(split_ranks=uneven, pg_options=options)
        return
    group = split_group(split_ranks=uneven, pg_options=options)
    reduce(group)
    assert group._get_backend(torch.device("npu")).options.is_high_priority_stream
    assert (group.size(), 64) in [(made["size"], made["buffer_size"]) for made in npu_sim.communicators()]


def test_a_buffer_of_no_size():
    with pytest.raises(ValueError, match="buffer_size, in MB, must be at least 1, got 0"):
        GroupOptions(buffer_size=0)
