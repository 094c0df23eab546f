"""Methods that gather as forward does, and what is called outside of the outermost forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, batch, data_mesh, groups_of, loss_of, pair, same_gradients, seeded
from torch import nn

from hp_fsdp import fully_shard, register_fsdp_forward_method
from hp_fsdp.torch.extend import all_gathered
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks


def models(*args: Any, **options: Any) -> tuple[Any, Any]:
    """`pair`, of models with attributes of their own."""
    return pair(*args, **options)


class Encoder(Net):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.blocks[0](x)
        return self.last(x) + self(torch.cat([x, x], 1)[:, :5])


def encoders(**options: Any) -> tuple[Any, Any]:
    reference, model = models(Encoder, **options)
    register_fsdp_forward_method(model, "encode")
    return reference, model


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_method_computes_and_trains_as_forward_does(reshard: bool):
    """The method calls forward in between and uses the parameters before and after."""
    reference, model = encoders(reshard_after_forward=reshard)
    whole, own = batch()
    model.set_reshard_after_forward(reshard)  # the root, too
    for _ in range(2):
        loss_of(reference.encode(whole)).backward()
        loss_of(model.encode(own)).backward()
        same_gradients(model, reference)
        assert not any(group.unsharded for group in groups_of(model))
        with torch.no_grad():
            assert torch.allclose(model.encode(own), reference.encode(own))
        loss_of(reference(whole)).backward()
        loss_of(model(own)).backward()
        same_gradients(model, reference)


@on_ranks(2)
def test_a_method_of_a_module_inside():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()
            self.last = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.encoder.encode(x))

    reference: Any = seeded(Outer)
    model: Any = copy.deepcopy(reference)
    fully_shard(model.encoder, data_mesh())
    register_fsdp_forward_method(model.encoder, "encode")
    fully_shard(model, data_mesh())
    loss_of(reference(batch()[0])).backward()
    loss_of(model(batch()[1])).backward()
    same_gradients(model, reference)


@on_ranks(2)
def test_an_error_in_a_method_leaves_the_next_call_right():
    reference, model = encoders()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|mat1"):
        model.encode(batch()[1][:, :3])
    assert torch.allclose(model.encode(batch()[1]), reference.encode(batch()[1]))


@on_ranks(1)
def test_names_that_are_no_methods():
    model = nn.Linear(1, 1)
    register_fsdp_forward_method(model, "no_such")  # as torch: modules that are not sharded are left alone
    fully_shard(model, data_mesh())
    with pytest.raises(ValueError, match="Linear has no method 'no_such', got None"):
        register_fsdp_forward_method(model, "no_such")


@on_ranks(2)
def test_parameters_outside_of_a_forward_are_refused():
    _, model = models(Encoder)
    with pytest.raises(
        RuntimeError, match=r"linear: parameter 'first.weight' of Encoder .* outside of it.*register_fsdp_forw"
    ):
        model.encode(batch()[1])


def t5() -> Any:
    transformers = pytest.importorskip("transformers", reason="T5 and its generate are transformers'")
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    torch.manual_seed(1)
    return transformers.T5ForConditionalGeneration(config).double().eval()


@on_ranks(2)
def test_generate_of_t5_with_texts_of_different_lengths():
    if device_type() != "cpu":
        pytest.skip("the models of transformers are run on the CPU")
    reference, model = t5(), t5()
    for block in [*model.encoder.block, *model.decoder.block]:
        fully_shard(block, data_mesh())
    fully_shard(model, data_mesh())
    rank = dist.get_rank()
    ids = torch.randint(2, 32, (2, 5 + rank), generator=torch.Generator().manual_seed(rank))
    with pytest.raises(RuntimeError, match="register_fsdp_forward_method"):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    register_fsdp_forward_method(model, "generate")
    for beams in (1, 2):
        options: Any = {"max_new_tokens": 3 + 2 * rank, "do_sample": False, "num_beams": beams}
        assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))
    labels = ids.clone()
    assert torch.allclose(model(ids, labels=labels).loss, reference(ids, labels=labels).loss)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_forwards_of_what_is_gathered_exchange_nothing_and_training_goes_on(reshard: bool):
    reference, model = models(Net, reshard_after_forward=reshard)
    model.set_reshard_after_forward(reshard)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    whole, own = batch()
    for _ in range(3):
        with all_gathered(model):
            with count_collectives() as counts:
                for rows in (own, own[:1], own):
                    assert torch.allclose(model(rows), reference(rows))
            assert not counts
        assert any(group.unsharded for group in groups_of(model)) is not reshard
        loss_of(model(own)).backward()
        loss_of(reference(whole)).backward()
        same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_an_error_among_forwards_of_what_is_gathered_leaves_the_model_as_it_was():
    reference, model = models(Net)
    whole, own = batch()
    with pytest.raises(ZeroDivisionError), all_gathered(model):
        model(own)
        raise ZeroDivisionError
    assert not any(group.unsharded or group.straight for group in groups_of(model))
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    same_gradients(model, reference)
