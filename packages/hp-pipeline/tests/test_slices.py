"""Sequences in slices, against one process that takes them whole, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import hp_pipeline
from hp_pipeline import MetaStepType, PipelineError, PipelineStage, SequenceState
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

WIDTH, TOKENS, CLASSES = 8, 12, 7


class Attention(nn.Module):
    """Causal attention with a recurrence behind it, whose tokens meet all before them."""

    def __init__(self, name):
        super().__init__()
        self.name, self.qkv, self.out = name, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x, state):
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        key, value = state.extend(self.name + "key", key, 2), state.extend(self.name + "value", value, 2)
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=x.device)
        mixed = scaled_dot_product_attention(query, key, value, seen.tril(key.shape[2] - query.shape[2]))
        rows, hidden = [], ([torch.zeros_like(x[:, 0]), *state.earlier(self.name + "hidden")])[-1]
        for row in mixed.transpose(1, 2).flatten(2).unbind(1):
            hidden = self.decay * hidden + row
            rows.append(hidden)
        state.put(self.name + "hidden", hidden)
        return x + self.out(torch.stack(rows, 1))


class Part(nn.Module):
    """Two layers, behind an embedding in the first part; in the last the loss."""

    def __init__(self, index, parts, again=None):
        super().__init__()
        torch.manual_seed(index)
        self.embed = nn.Embedding(CLASSES, WIDTH) if index == 0 else None
        self.layers = nn.ModuleList(Attention(f"{layer}.") for layer in range(2))
        self.head = nn.Linear(WIDTH, CLASSES) if index == parts - 1 else None
        self.again = again

    def forward(self, x, target=None, seq_state=None, reduction="mean"):
        state = seq_state or SequenceState()
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, state) if self.again is None else checkpoint(layer, x, state, use_reentrant=self.again)
        if self.head is None:
            return x
        return cross_entropy(self.head(x).flatten(0, 1), target.flatten(), reduction=reduction)


def parts_of(count, **options):
    return nn.ModuleList(Part(index, count, **options) for index in range(count)).double().to(device_type())


def tokens(rows):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(CLASSES, (2, rows, TOKENS), generator=generator).to(device_type())


def compare(name, micro_batches, slices, chunks=1, reduction="mean", **options):
    count = chunks * dist.get_world_size()
    x, target = tokens(2 * micro_batches)
    mean = reduction == "mean"
    whole = parts_of(count)
    expected = []
    for micro, row in zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True):
        hidden = micro
        for part in whole[:-1]:
            hidden = part(hidden)
        expected.append(whole[-1](hidden, row, reduction=reduction))
        (expected[-1] / micro_batches if mean else expected[-1]).backward()

    parts = parts_of(count, **options)
    kind = getattr(hp_pipeline, name)
    placement = hp_pipeline.placed(kind.shape, dist.get_world_size())
    own = [index for index, rank in enumerate(placement) if rank == dist.get_rank()]
    stages = [PipelineStage(parts[index], index, count) for index in own]
    schedule = kind(stages, micro_batches, seq_slices=slices, scale_grads=mean)
    last = count - 1 in own
    for _ in range(2):
        parts.zero_grad()
        losses = schedule.run(
            *([x] if 0 in own else []), **({"target": target, "reduction": reduction} if last else {})
        )
        torch.testing.assert_close(losses, [each.detach() for each in expected] if last else [], rtol=1e-12, atol=1e-12)
        for index in own:
            for one, other in zip(parts[index].parameters(), whole[index].parameters(), strict=True):
                assert torch.allclose(one.grad, other.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize(("name", "chunks"), [("ScheduleSeqPP", 1), ("ScheduleZB1P", 1), ("ScheduleLoopedBFS", 2)])
def test_slices_equal_whole_sequences(name, chunks):
    for micro_batches, slices in ((1, 2), (2, 3)):
        compare(name, micro_batches, slices, chunks)


@on_ranks(2)
def test_sums_and_checkpointed_layers():
    compare("ScheduleSeqPP", 2, 4, reduction="sum")
    compare("ScheduleSeqPP", 2, 3, again=False)


@on_ranks(2)
def test_slices_that_would_be_wrong_are_refused():
    rank = dist.get_rank()
    x, target = tokens(2)
    inputs = {} if rank == 0 else {"target": target}
    stage = PipelineStage(nn.Linear(2, 2).to(device_type()), rank, 2)
    text = r"module of PipelineStage\(. of 2: Linear\) takes no 'seq_state', so tokens of a slice would not meet"
    with pytest.raises(ValueError, match=text):
        hp_pipeline.ScheduleSeqPP(stage, 2, seq_slices=2)
    alone = PipelineStage(Alone(rank).to(device_type()), rank, 2)
    losses = hp_pipeline.ScheduleSeqPP(alone, 2, seq_slices=3).run(*([x.double()] if rank == 0 else []))
    expected = [Alone(1)(Alone(0)(row)) for row in x.double().cpu().chunk(2)] if rank else []
    torch.testing.assert_close([loss.cpu() for loss in losses], expected)
    parts = parts_of(2, again=True)
    with pytest.raises(ValueError, match="seq_slices=2 is for training; a stage with has_backward=False"):
        hp_pipeline.ScheduleGPipe(PipelineStage(parts[rank], rank, 2, has_backward=False), 2, seq_slices=2)
    whole = PipelineStage(parts_of(2)[rank], rank, 2, has_backward=False)
    hp_pipeline.ScheduleGPipe(whole, 2, seq_slices=1).run(x, **inputs)
    stage = PipelineStage(parts[rank], rank, 2)
    with pytest.raises(ValueError, match="12 tokens along dim 1, which 5 slices do not divide"):
        hp_pipeline.ScheduleSeqPP(stage, 2, seq_slices=5).run(x, **inputs)
    with pytest.raises(PipelineError, match=r"rank 0 at 0F0: RuntimeError: .*'0.key' is put where no gradients are"):
        hp_pipeline.ScheduleSeqPP(stage, 2, seq_slices=2).run(x, **inputs)
    stage = PipelineStage(parts_of(2, again=False)[rank], rank, 2)
    losses = hp_pipeline.ScheduleSeqPP(stage, 2, seq_slices=2).run(x, **inputs)
    whole = hp_pipeline.ScheduleSeqPP(PipelineStage(parts_of(2)[rank], rank, 2), 2).run(x, **inputs)
    torch.testing.assert_close(losses, whole)
    state = SequenceState()
    state.put("key", x)
    with pytest.raises(ValueError, match="slice 0 has put 'key' already; each layer needs a name of its own"):
        state.put("key", x)
    state.put("key of the next layer", x)


class Alone(nn.Module):
    """A stage whose tokens do not meet; the second is the loss."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.index, self.weight = index, nn.Parameter(torch.randn((), dtype=torch.float64))

    def forward(self, x, seq_state=None):
        return (x * self.weight).square().mean() if self.index else torch.sin(x * self.weight)


@on_ranks(2)
def test_a_slice_that_fails_is_named_and_the_next_run_works():
    rank = dist.get_rank()
    x, target = tokens(2)
    inputs = {} if rank == 0 else {"target": target}
    schedule = hp_pipeline.ScheduleSeqPP(PipelineStage(parts_of(2)[rank], rank, 2), 2, seq_slices=3)
    failing = [True]

    def custom(step, run):
        if failing and str(step) == "1B0.2":
            raise ArithmeticError("too hot")
        run()

    schedule.register_custom_function(MetaStepType.BACKWARD, custom)
    with pytest.raises(PipelineError, match=r"rank 1 at 1B0\.2: ArithmeticError: too hot"):
        schedule.run(x, **inputs)
    failing.clear()
    assert len(schedule.run(x, **inputs)) == 2 * rank
