"""What an editor and a type checker know of a sharded module; `nox -s types` runs pyright on this file."""

from __future__ import annotations

from typing import assert_type

import pytest
from torch import nn

from hp_fsdp import FSDPModule, fully_shard
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.linear = nn.Linear(self.width, self.width)

    def last(self) -> nn.Linear:
        return self.linear


@on_ranks(1)
def test_a_sharded_module_keeps_its_own_type():
    model = fully_shard(Net())
    assert_type(model, Net)
    assert_type(model.width, int)
    assert_type(model.last(), nn.Linear)
    assert type(model) is not Net and isinstance(model, Net)


@on_ranks(1)
def test_isinstance_adds_the_methods_of_sharding():
    model = fully_shard(Net())
    assert isinstance(model, FSDPModule)
    assert_type(model.width, int)  # still its own
    assert_type(model.last(), nn.Linear)
    assert_type(model.set_requires_gradient_sync(False), None)
    handle = model.unshard(async_op=True)
    assert handle is not None
    assert_type(handle.wait(), None)
    assert_type(model.reshard(), None)


@on_ranks(1)
def test_lists_keep_theirs():
    blocks = fully_shard([Net(), Net()])
    assert_type(blocks, list[Net])
    assert all(isinstance(each, FSDPModule) for each in blocks)
