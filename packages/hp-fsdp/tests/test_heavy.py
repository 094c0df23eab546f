"""Heavy operations in frames, in models that are sharded: put off, kept and handed back."""

from __future__ import annotations

import pytest
from fsdp_models import Net, batch, data_mesh, loss_of, pair, same_gradients, seeded
from torch.utils.checkpoint import checkpoint

from hp_fsdp import fully_shard
from hp_platform import count_collectives
from hp_platform.frames import frame
from hp_platform.torch.heavy import DeferredGradients, KeptOutputs, mark
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")


@on_ranks(2)
@pytest.mark.parametrize("once", [True, False])
def test_gradients_put_off_are_reduced_when_they_come(once) -> None:
    reference, model = pair(Net)
    mark(model)
    for _ in range(2):
        whole, part = batch()
        loss_of(reference(whole)).backward()
        deferred = DeferredGradients()
        model.set_requires_gradient_sync(not once)
        with frame(weights=deferred):
            loss = loss_of(model(part))
        loss.backward()
        assert len(deferred) == 8 and all(p.grad is None for n, p in model.named_parameters() if "norm" not in n)
        model.set_requires_gradient_sync(True)
        with count_collectives() as counts:
            deferred.run()
        assert counts["reduce_scatter"] == 4, "one for each group"
        same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2)
def test_two_micro_batches_and_one_reduction() -> None:
    reference, model = pair(Net)
    mark(model)
    deferred, (whole, part) = DeferredGradients(), batch()
    (loss_of(reference(whole)) + 2 * loss_of(reference(whole))).backward()
    model.set_requires_gradient_sync(False)
    for factor in (1, 2):
        with frame(weights=deferred):
            loss = factor * loss_of(model(part))
        loss.backward()
    model.set_requires_gradient_sync(True)
    deferred.run()
    same_gradients(model, reference)


@on_ranks(2)
def test_outputs_are_handed_back() -> None:
    reference, model = pair(Net)
    mark(model)
    for block in model.blocks:
        block.forward = _again(block.forward, KeptOutputs(["blocks.0.up", "blocks.1.up", "blocks.2.down"]))
    deferred, (whole, part) = DeferredGradients(), batch()
    loss_of(reference(whole)).backward()
    with frame(weights=deferred):
        loss = loss_of(model(part))
    loss.backward()
    deferred.run()
    same_gradients(model, reference)


def _again(forward, kept):
    return lambda x: checkpoint(forward, x, use_reentrant=False, context_fn=kept.contexts)


@on_ranks(2)
def test_deterministic_groups_refuse_to_put_off() -> None:
    model = fully_shard(seeded(Net), mesh=data_mesh(), deterministic=True)
    with frame(weights=DeferredGradients()), pytest.raises(NotImplementedError, match="would count as a micro-batch"):
        model(batch()[1])
