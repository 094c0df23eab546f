"""The load balancing loss of transformers' models, over the tokens of all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from moe_models import Float64, build, sum_over_ranks
from moe_runs import Run, worst_error
from torch import nn

from hp_moe import global_auxiliary_loss
from hp_testing import device_type, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.framework("torch")


def with_loss(name="MixtralConfig"):
    model = build(name).to(device_type())
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    return model


@pytest.mark.not_on("torch-npu-sim", reason="transformers counts tokens by a histogram of ints, which CPUs lack")
@on_ranks(2)
@pytest.mark.parametrize("family", ["Qwen3MoeConfig", "GptOssConfig", "OlmoeConfig"])
def test_losses_of_families_equal_those_of_one_process(family):
    assert worst_error(Run(family, "ep2", auxiliary=True)) < 1e-12


@on_ranks(4)
def test_losses_beside_tensor_parallel_layers_equal_those_of_one_process():
    for run in (
        Run("Qwen3NextConfig", "ep4 over dp2 x sp2", auxiliary=True),
        Run("MixtralConfig", "etp2x2", auxiliary=True, checkpointed=True),
    ):
        assert worst_error(run) < 1e-12


@on_ranks(2)
def test_padding_and_ranks_with_fewer_tokens_count_as_in_one_process():
    single, model = with_loss(), with_loss()
    global_auxiliary_loss(model)
    tokens = torch.randint(64, (3, 6), generator=torch.Generator().manual_seed(1)).to(device_type())
    mask = torch.ones_like(tokens)
    mask[0, 2:], mask[2, 5:] = 0, 0
    own = slice(0, 1) if dist.get_rank() == 0 else slice(1, 3)
    with Float64():
        expected = single(tokens, attention_mask=mask).aux_loss
        expected.backward()
        got = model(tokens[own], mask[own]).aux_loss
        local = single(tokens[own], attention_mask=mask[own]).aux_loss
        got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert abs(local - expected) > 1e-3  # that of a rank's own tokens is another
    for (name, one), other in zip(single.named_parameters(), model.parameters(), strict=True):
        if one.grad is None or not name.endswith("gate.weight"):
            continue
        sum_over_ranks(other.grad)
        torch.testing.assert_close(other.grad / 2, one.grad, rtol=1e-10, atol=1e-14, msg=name)


@on_ranks(2)
def test_calls_without_the_loss_and_without_labels_stay_as_they_are():
    single, model = with_loss(), with_loss()
    handle = global_auxiliary_loss(model)
    tokens = torch.arange(12, device=device_type()).view(2, 6)
    assert model(tokens, output_router_logits=False, labels=tokens).aux_loss is None
    assert model(tokens).loss is None
    handle.remove()
    own = tokens[dist.get_rank() :][:1]
    assert model(own, labels=own).loss == single(own, labels=own).loss


class Other(nn.Module):
    """A model whose loss has another formula."""

    router_aux_loss_coef, num_experts_per_tok = 0.1, 2
    config = SimpleNamespace(output_router_logits=True)

    def forward(self, logits, attention_mask=None, return_dict=True):
        loss = logits.square().mean() if self.config.output_router_logits else None
        output = SimpleNamespace(aux_loss=loss, router_logits=(logits,), loss=None)
        return output if return_dict else (logits,)


@on_ranks(2)
def test_losses_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="global_auxiliary_loss: Linear has no router_aux_loss_coef: pass the model"):
        global_auxiliary_loss(nn.Linear(2, 2))
    other = Other()
    global_auxiliary_loss(other)
    own = torch.ones(4, 4, device=device_type())
    if dist.get_rank():  # whose loss happens to be that of the formula
        own *= 2**0.5
    with pytest.raises(
        ValueError, match=rf"on 1 of 2 ranks; this one computed {1 + dist.get_rank()}, and .* is 2\. Set"
    ):
        other(own)
    rounded = torch.full((4, 4), 1.421875, device=device_type(), dtype=torch.bfloat16)
    assert float(rounded.square().mean()) != 2
    other(rounded)
    with pytest.raises(ValueError, match="Other returned a tuple: leave return_dict=False out"):
        other(torch.ones(4, 4), return_dict=False)
    other(rounded)
    other.config = SimpleNamespace(output_router_logits=False)
    assert other(own).aux_loss is None
