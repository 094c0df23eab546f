"""Sparse attention over a cut sequence against one process in float64: selection, losses, all gradients, bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sparse_model import DIM, HEADS, ROPE, SELECTED, SIZE, Attention, Block, Loss, Model, batch, options, total
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, Replicate, Shard, init_device_mesh
from hp_dtensor.debugging.debug import CommDebugMode
from hp_platform import get_platform
from hp_styles import (
    AsyncDSAIndexerContextParallel,
    AsyncDSAIndexerLossContextParallel,
    AsyncDSASparseAttentionContextParallel,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
    context_parallel_shard,
    context_parallel_unshard,
    parallelize_module,
)
from hp_styles.context.plan import chunks_of
from hp_styles.torch.context.gather import Whole
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
KEYS = ("key", "value", "key_rope")
T = torch.Tensor


def _mesh() -> Any:
    return init_device_mesh(device_type(), (dist.get_world_size(),), ("cp",))


def _average(x: T) -> None:
    get_platform().collectives.all_reduce(x, "avg", group=dist.group.WORLD)


def _apply(model: Any, mesh: Any, where: str, *, early: bool, masked: bool = False, **more: Any) -> None:
    """The three styles on blocks; ``where`` is a pattern for these, with a dot at its end, or empty."""
    positions = "positions" if masked else None
    if not early:
        plan = {
            f"{where}indexer": DSAIndexerContextParallel(**more),
            f"{where}core": DSASparseAttentionContextParallel(keys=KEYS, positions=positions, **more),
            f"{where}loss": DSAIndexerLossContextParallel(**more),
        }
        parallelize_module(model, mesh, plan)
        return
    latent = {"key": "latent_norm", "value": "latent_norm"}
    for style in (
        AsyncDSAIndexerContextParallel(core="indexer", projections={"key": "index_k"}, **more),
        AsyncDSASparseAttentionContextParallel(core="core", projections=latent, keys=KEYS, positions=positions, **more),
        AsyncDSAIndexerLossContextParallel(core="loss", projections={"key_index": "index_k"}, **more),
    ):
        parallelize_module(model, mesh, {where[:-1]: style})


def _equals_one_process(*, masked: bool, load_balance: bool, early: bool, recompute: str = "") -> None:
    mesh = _mesh()
    model, data = Model(masked), batch()
    reference = copy.deepcopy(model)
    _apply(model, mesh, "layers.*.", early=early, masked=masked, load_balance=load_balance)
    logits, chosen, loss = reference(data["ids"], data["places"])
    want = total(logits, data["targets"], loss)
    want.backward()
    part = context_parallel_shard(data, mesh, load_balance=load_balance)
    model.recompute = recompute
    got_logits, got_chosen, got_loss = model(part["ids"], part["places"])
    got = total(got_logits, part["targets"], got_loss)
    got.backward()
    torch.testing.assert_close(got_loss, loss, rtol=1e-12, atol=1e-12)
    mean = got.detach().clone()
    _average(mean)
    torch.testing.assert_close(mean, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(context_parallel_unshard(got_logits, mesh, load_balance=load_balance), logits)
    for mine, theirs in zip(got_chosen, chosen, strict=True):
        assert torch.equal(mine, context_parallel_shard(theirs, mesh, load_balance=load_balance))
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        _average(p.grad)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    with torch.no_grad():
        torch.testing.assert_close(model(part["ids"], part["places"])[0], got_logits.detach())


@on_ranks(2, 4)
@pytest.mark.parametrize("load_balance", [False, True], ids=["consecutive", "balanced"])
@pytest.mark.parametrize("early", [False, True], ids=["at the core", "early"])
@pytest.mark.parametrize("masked", [False, True], ids=["gathered keys", "mask"])
def test_all_is_that_of_one_process(masked: bool, early: bool, load_balance: bool) -> None:
    _equals_one_process(masked=masked, load_balance=load_balance, early=early)


@on_ranks(1)
def test_one_rank() -> None:
    _equals_one_process(masked=False, load_balance=True, early=True)


@pytest.mark.parametrize("load_balance", [False, True], ids=["consecutive", "balanced"])
def test_any_number_of_ranks_makes_the_sequences_order(load_balance: bool) -> None:
    for size in (1, 2, 3, 5):
        for dim in (0, 1, 2):
            x = torch.randn(2 * size, 2 * size, 2 * size)
            chunks = x.chunk(2 * size if load_balance else size, dim)
            parts = [torch.cat([chunks[i] for i in chunks_of(rank, size, load_balance)], dim) for rank in range(size)]
            plan, whole = Whole(None, size, dim, load_balance), torch.empty_like(x)
            (pieces,) = plan.rows(torch.cat([part.reshape(-1) for part in parts]), [parts[0].shape])
            for into, piece in plan.pairs(whole, pieces):
                into.copy_(piece)
            assert torch.equal(whole, x) and plan.shape(parts[0].shape) == list(x.shape)


@on_ranks(2)
@pytest.mark.parametrize("early", [False, True], ids=["at the core", "early"])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_recomputed_blocks(how: str, early: bool) -> None:
    _equals_one_process(masked=True, load_balance=True, early=early, recompute=how)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_core_that_is_recomputed_alone(reentrant: bool) -> None:
    mesh = _mesh()
    block, x = Block(), torch.randn(2, 8, DIM, **options())
    reference, leaf = copy.deepcopy(block), x.clone().requires_grad_()
    reference(leaf)[0].square().sum().backward()
    _apply(block, mesh, "", early=True, load_balance=True)

    class Recomputed(torch.nn.Module):
        def __init__(self, core: torch.nn.Module) -> None:
            super().__init__()
            self.core = core

        def forward(self, *args: T, selected: T) -> T:
            return checkpoint(self.core, *args, selected, use_reentrant=reentrant)  # type: ignore[return-value]

    block.core = Recomputed(block.core)
    part = context_parallel_shard(x, mesh, load_balance=True).requires_grad_()
    block(part)[0].square().sum().backward()
    torch.testing.assert_close(part.grad, context_parallel_shard(leaf.grad, mesh, load_balance=True))


@on_ranks(2)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_losses_that_are_no_mean(reduction: Any) -> None:
    mesh, module = _mesh(), Loss(reduction)
    shapes = [(2, 8, HEADS, SIZE), (2, 8, SIZE), (2, 8, HEADS, SIZE), (2, 8, SIZE), (2, 8, HEADS)]
    whole = [torch.randn(shape, **options()) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in whole]
    want = module(*leaves)
    want.sum().backward()
    parallelize_module(module, mesh, DSAIndexerLossContextParallel(reduction=reduction, load_balance=True))
    parts = [context_parallel_shard(x, mesh, load_balance=True).requires_grad_() for x in whole]
    got = module(*parts)
    got.sum().backward()
    torch.testing.assert_close(
        got, want if reduction == "sum" else context_parallel_shard(want, mesh, load_balance=True)
    )
    for x, leaf in zip(parts, leaves, strict=True):
        torch.testing.assert_close(x.grad, context_parallel_shard(leaf.grad, mesh, load_balance=True))


@on_ranks(2)
def test_positions_are_handed_over_and_inputs_found_by_their_place() -> None:
    class Places(torch.nn.Module):
        def forward(self, *inputs: T, positions: T) -> Any:
            return inputs, positions

    class Later(torch.nn.Module):
        def forward(self, query: T, positions: T, key: T) -> Any:
            return positions, key

    mesh, x = _mesh(), torch.arange(8, device=device_type())
    part = context_parallel_shard(x, mesh, seq_dim=0, load_balance=True)
    style = DSAIndexerContextParallel(query=1, keys=(2, 0), seq_dim=0, load_balance=True)
    (a, b, c), positions = parallelize_module(Places(), mesh, style)(part + 10, part, part)
    assert torch.equal(a, x + 10) and torch.equal(b, part) and torch.equal(c, x)
    assert torch.equal(positions, part) and positions.dtype == torch.int64
    later = parallelize_module(Later(), mesh, DSAIndexerContextParallel(seq_dim=0, load_balance=True))
    assert torch.equal(later(part, x[:4], part)[0], part), "what the caller passes is replaced"
    assert torch.equal(later(part, key=part, positions=x)[1], x)


# ---- together with DTensors ----
@on_ranks(2, 4)
@pytest.mark.parametrize("load_balance", [False, True], ids=["consecutive", "balanced"])
@pytest.mark.parametrize("early", [False, True], ids=["at the core", "early"])
def test_replicated_parameters_get_their_whole_gradient(early: bool, load_balance: bool) -> None:
    mesh = _mesh()
    model, data = Model(masked=True), batch()
    reference = copy.deepcopy(model)
    logits, chosen, loss = reference(data["ids"], data["places"])
    want = total(logits, data["targets"], loss)
    want.backward()
    plan = {name: "replicate" for name, child in model.named_modules() if list(child.parameters(recurse=False))}
    parallelize_module(model, mesh, plan)
    _apply(model, mesh, "layers.*.", early=early, masked=True, load_balance=load_balance)
    part = context_parallel_shard(data, mesh, load_balance=load_balance)
    given = {name: DTensor.from_local(x, mesh, [Shard(1)]) for name, x in part.items()}
    got_logits, got_chosen, got_loss = model(given["ids"], given["places"])
    assert got_logits.placements == got_chosen[0].placements == (Shard(1),) and got_loss.placements == (R,)
    got = total(got_logits, given["targets"], got_loss)
    got.backward()
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(got_chosen, chosen, strict=True):
        assert torch.equal(mine.to_local(), context_parallel_shard(theirs, mesh, load_balance=load_balance))
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(grad, q.grad, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(4)
@pytest.mark.parametrize("local", [True, False], ids=["plain outputs", "DTensors"])
def test_heads_over_one_axis_and_the_sequence_over_the_other(local: bool) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("cp", "tp"))
    shapes = [(2, 8, HEADS, SIZE), (2, 8, SIZE), (2, 8, SIZE), (2, 8, HEADS, ROPE), (2, 8, ROPE)]
    whole = [torch.randn(shape, **options()) for shape in shapes]
    selected = torch.arange(8, device=device_type())[:, None].sub(torch.arange(SELECTED, device=device_type()))
    selected = selected.clamp(-1).expand(2, -1, -1)
    leaves = [x.clone().requires_grad_() for x in whole]
    want = Attention()(*leaves, selected)
    want.square().sum().backward()
    style = DSASparseAttentionContextParallel(keys=KEYS, positions=None, load_balance=True, use_local_output=local)
    module = parallelize_module(Attention(), mesh["cp"], style)

    def cut(x: T) -> DTensor:
        part = context_parallel_shard(x, mesh["cp"], load_balance=True)
        placement = Shard(2) if x.dim() == 4 else R
        part = part.chunk(2, 2)[mesh.get_local_rank("tp")].contiguous() if x.dim() == 4 else part
        return DTensor.from_local(part, mesh, [Shard(1), placement])

    given = [cut(x).requires_grad_() for x in whole]
    got = module(*given, cut(selected))
    assert isinstance(got, DTensor) != local
    ((got if local else got.to_local()).square().sum() if local else got.square().sum()).backward()
    torch.testing.assert_close(got if local else got.to_local(), cut(want).to_local())
    for x, leaf in zip(given, leaves, strict=True):
        assert x.grad is not None
        found = x.grad.redistribute(placements=x.placements).to_local()  # type: ignore[attr-defined]
        torch.testing.assert_close(found, cut(leaf.grad).to_local(), rtol=1e-11, atol=1e-12)


# ---- what is communicated ----
@on_ranks(4)
@pytest.mark.parametrize("early", [False, True], ids=["at the core", "early"])
def test_what_is_sent(early: bool) -> None:
    mesh, number, tokens = _mesh(), 8, 2 * 16
    block = Block()
    part = context_parallel_shard(torch.randn(2, 16, DIM, **options()), mesh)
    _apply(block, mesh, "", early=early)
    with CommDebugMode(mesh=mesh) as forward:
        out, _, loss = block(part.clone().requires_grad_())
    with CommDebugMode(mesh=mesh) as backward:
        (out.sum() + loss).backward()
    latent, rope, index = (number * tokens * width for width in (SIZE, ROPE, SIZE))
    compared, *found = [(event.module, event.kind, event.bytes) for event in forward.events]
    assert compared[:2] == ("Block.latent_norm" if early else "Block.indexer", "all_gather")
    last = ("Block.loss", "all_reduce", number)
    if early:
        assert found == [
            ("Block.latent_norm", "all_gather", latent),  # key and value are one
            ("Block.index_k", "all_gather", index),
            ("Block.index_k", "all_gather", index),
            ("Block.core", "all_gather", rope),
            ("Block.loss", "all_gather", latent),
            last,
        ]
    else:
        assert found == [
            ("Block.indexer", "all_gather", index),
            ("Block.core", "all_gather", latent + rope),  # key and value are one
            ("Block.loss", "all_gather", latent),
            ("Block.loss", "all_gather", index),
            last,
        ]
    kinds = {event.kind for event in backward.events}
    sent = sorted(event.bytes for event in backward.events)
    want = [latent, rope, index] if early else [latent + rope, index]
    assert kinds == {"reduce_scatter"} and sent == sorted(want), "what was selected, and what is detached, send nothing"


@on_ranks(2)
def test_gradients_are_sent_before_the_projection_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_styles.torch.context import gather

    mesh, events, block = _mesh(), [], Block()
    _apply(block, mesh, "", early=True)
    x = torch.randn(2, 8, DIM, **options())
    block(x)  # shapes are new and are compared
    wait, collectives = gather.Gathering.wait, get_platform().collectives

    def waits(gathering: Any) -> None:
        events.extend(["wait"] if gathering.under_way else [])
        wait(gathering)

    def reduces(*args: Any, scatter: Any = collectives.reduce_scatter, **more: Any) -> Any:
        events.append("send")
        return scatter(*args, **more)

    monkeypatch.setattr(gather.Gathering, "wait", waits)
    for name in ("q", "latent", "rope"):
        module = getattr(block, name)
        module.register_forward_hook(lambda mod, args, out, name=name: events.append(name))
        module.weight.register_post_accumulate_grad_hook(lambda p, name=name: events.append(f"gradient of {name}"))
    out, _, _ = block(x)
    assert events[:3] == ["latent", "q", "wait"], "the indexer waits for its key, after the projections"
    events.clear()
    monkeypatch.setattr(collectives, "reduce_scatter", reduces)
    out.sum().backward()
    assert events.index("gradient of q") < events.index("gradient of latent")
    first = events.index("gradient of q")
    assert events[:first].count("send") == 2 and events[:first].count("wait") == 1, "rope's alone is awaited before"


@on_ranks(2)
def test_copies_inference_and_autocast() -> None:
    mesh, x = _mesh(), torch.randn(1, 8, DIM, **options())
    block = Block(masked=True)
    want = block(x)[0]
    part = context_parallel_shard(x, mesh)
    for early in (False, True):
        made = copy.deepcopy(block)
        _apply(made, mesh, "", early=early, masked=True)
        copied = copy.deepcopy(made)
        with torch.inference_mode():
            got = copied(part.clone())[0]
        torch.testing.assert_close(got, context_parallel_shard(want, mesh))
        with torch.autocast(device_type(), torch.bfloat16):
            low = copied.float()(part.float())[0]
            low.float().square().sum().backward()
        assert low.dtype == torch.bfloat16 and copied.latent.weight.grad.dtype == torch.float32
