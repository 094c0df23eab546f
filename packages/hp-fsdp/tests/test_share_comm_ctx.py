"""share_comm_ctx: several sharded models in one program, their passes in turns."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import Net, data_mesh, loss_of, pair, rows, same_gradients, same_weights
from torch import nn

from hp_fsdp import fully_shard, share_comm_ctx
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def stage() -> nn.Module:
    return Net(blocks=2)


@on_ranks(2)
def test_stages_with_shared_streams_in_turns():
    pairs = [pair(stage), pair(stage)]
    share_comm_ctx([model for _, model in pairs])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for both in pairs for net in both]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(24, 5, generator=generator, dtype=torch.float64).to(device_type())
        for nets, x in ((tuple(one for one, _ in pairs), whole), (tuple(two for _, two in pairs), rows(whole))):
            first, second = nets
            outputs = [(first(part), second(part)) for part in (x, x + 1)]  # both forwards before a backward
            for one, two in outputs:
                loss_of(two).backward()
                loss_of(one).backward()
        for reference, model in pairs:
            same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for reference, model in pairs:
        same_weights(model, reference)


@on_ranks(1)
def test_modules_that_are_not_sharded():
    share_comm_ctx([])
    with pytest.raises(ValueError, match="number 1 is a Linear. Call fully_shard on it first"):
        share_comm_ctx([pair()[1], nn.Linear(2, 2)])
    share_comm_ctx([pair()[1], fully_shard(nn.Linear(2, 2, device=device_type()), data_mesh())])
