"""What torch's other wrappers and torchtitan do with sharded modules: refused by name, the module left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_models import loss_of, pair, rows, same_gradients, train
from torch import nn
from torch.distributed import fsdp

from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def around(model: nn.Module) -> list[nn.Module]:
    return [model, nn.Sequential(nn.Linear(5, 5).to(device_type(), torch.float64), model)]


@on_ranks(2)
def test_torchs_wrappers_are_refused():
    reference, model = pair()
    for net in around(model):
        with pytest.raises(TypeError, match="torch's fully_shard on a module that hp_fsdp.fully_shard sharded"):
            fsdp.fully_shard(net)
        with pytest.raises(TypeError, match="FullyShardedDataParallel around modules of hp_fsdp.fully_shard"):
            fsdp.FullyShardedDataParallel(net, device_id=torch.device(device_type()))
    train(reference, model, steps=2)


@on_ranks(1)
def test_it_is_no_instance_of_torchs_class():
    _, model = pair()
    assert not isinstance(model, fsdp.FSDPModule)


# As torchtitan.distributed.fsdp has it; torchtitan is not needed for the check.
TITAN = """
def disable_fsdp_gradient_division(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
"""


@on_ranks(2)
def test_torchtitans_switch_of_the_division_is_refused():
    model: Any
    reference, model = pair()
    there: dict[str, Any] = {"__name__": "torchtitan.distributed.fsdp", "FSDPModule": fsdp.FSDPModule}
    exec(TITAN, there)
    with pytest.raises(TypeError, match=r"Call model.set_gradient_divide_factor\(1.0, recurse=True\) instead"):
        there["disable_fsdp_gradient_division"](model)
    model.set_gradient_divide_factor(1.0, recurse=True)
    whole = torch.randn(24, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(device_type())
    (loss_of(reference(whole)) * len(whole)).backward()  # a sum over the rows of all ranks
    own = rows(whole)
    (loss_of(model(own)) * len(own)).backward()
    same_gradients(model, reference)


@on_ranks(2)
def test_torchtitans_clipping_in_torchs_functions():
    reference, model = pair()
    whole = torch.randn(24, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(device_type())
    loss_of(reference(whole)).backward()
    loss_of(model(rows(whole))).backward()
    norms = []
    for net in (reference, model):
        gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients, 2.0))
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, norms[-1])
    torch.testing.assert_close(norms[1].full_tensor(), norms[0], atol=1e-10, rtol=1e-10)
    same_gradients(model, reference)
