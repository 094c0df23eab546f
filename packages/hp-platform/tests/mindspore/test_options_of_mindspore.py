"""Options of process groups on MindSpore."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hp_platform import GroupOptions, get_platform
from hp_platform.mindspore.groups import own_options
from hp_testing import on_ranks


@on_ranks(3)
def test_options_of_groups():
    groups = get_platform().groups
    if groups.rank() < 2:  # no other test makes this pair: options are for the call that makes a group
        with pytest.raises(ValueError, match="buffer_size=64 is an option of hccl; the group's backend is mccl"):
            groups.new_group([0, 1], GroupOptions(buffer_size=64))
    with pytest.raises(ValueError, match=r"the group of ranks \(0, 1, 2\) already exists, created with None"):
        groups.new_group([0, 1, 2], GroupOptions(buffer_size=64))
    with pytest.raises(ValueError, match="high_priority=True: MindSpore chooses the streams"):
        own_options(GroupOptions(high_priority=True), "hccl")
    with pytest.raises(ValueError, match="does not support a timeout per group"):
        own_options(GroupOptions(timeout=timedelta(seconds=1)), "hccl")
    assert own_options(GroupOptions(buffer_size=64), "hccl").hccl_config == {"hccl_buffer_size": 64}
    assert own_options(GroupOptions(), "mccl") is None
