"""Peaks of memory that a dry run foretells, beside what peers foretell of their own programs, on five plans each.

python packages/hp-plan/benchmarks/bench_foretold.py

- `dry_run` against real ranks of the same plan.
- `FSDPMemTracker` under a `FakeTensorMode` (torch.distributed._tools) against real ranks of the same FSDP2 program.
- One process with torch's "fake" backend, real tensors and real kernels, which is how torchtitan's
  `--comm.mode=fake_backend` plays a rank, against real ranks of the same FSDP2 program.
- The closed form of Megatron-LM's `theoretical_memory_usage` (weights and optimizer 18 bytes a parameter; activations
  after Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, equation 4) against
  real ranks of a plan of the same model in bfloat16 with the same mesh. Its program is another one than ours, so that
  both what is stored for a parameter and what backward needs differ: it is here for the size of the error that a
  formula has which does not follow the program.

Real peaks are those of the rank with the most, on gloo ranks of this machine, read by `hp_plan.torch.dry.ledger` in
each case: bytes of tensors, without an allocator's rounding, and the least of steps 3 to 8, as gloo's threads let go of
what they sent a moment late in some.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_plan import ParallelPlan, build_model, dry_run
from hp_plan.dry.stages import StagePeers, play_stages
from hp_plan.torch.dry.ledger import Ledger
from hp_plan.torch.dry.playing import Played, without_collector
from hp_plan.torch.dry.reading import report_of
from hp_plan.torch.timing.ranks import on_ranks
from hp_platform import get_platform

MODEL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SAMPLES, LENGTH, STEPS = 8, 128, 8
RECOMPUTE = {"memory": {"recompute": ["model.layers.*"]}}
NO_RESHARD = {"fsdp": {"reshard_after_forward": False}}
BFLOAT16 = {"fsdp": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
SHARDED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp 2": ({"dp_shard": 2}, {}),
    "fsdp 4": ({"dp_shard": 4}, {}),
    "fsdp 2, no reshard": ({"dp_shard": 2}, NO_RESHARD),
    "fsdp 2, recompute": ({"dp_shard": 2}, RECOMPUTE),
    "fsdp 2, bfloat16": ({"dp_shard": 2}, BFLOAT16),
}
STAGES = {"pipeline": {"schedule": "1f1b", "micro_batches": 4}}
SEQUENCE = {"styles": "auto-sequence"}
MEGATRON: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "replicas 2": ({"dp_replicate": 2}, {}),
    "tp 2, sequence": ({"tp": 2}, SEQUENCE),
    "tp 4, sequence": ({"tp": 4}, SEQUENCE),
    "pp 2": ({"pp": 2}, STAGES),
    "pp 2 x tp 2": ({"pp": 2, "tp": 2}, {**SEQUENCE, **STAGES}),
}


def plan_of(mesh: dict[str, int], sections: dict[str, Any], **run: Any) -> ParallelPlan:
    """Return the plan of a Llama."""
    data = {"sequence_length": LENGTH, "batch_size": SAMPLES}
    tables: dict[str, Any] = {"model": {"config": "LlamaConfig", "overrides": MODEL}, "mesh": mesh, "data": data}
    return ParallelPlan.from_dict({**tables, **sections, "run": {"grad_clip": 1.0, **run}})


def real_peak(plan: ParallelPlan) -> int:
    """Return the peak of a plan's steps on this rank."""
    with without_collector():
        played = Played(plan, Ledger(("cpu",)), torch.device("cpu"))
        peaks = []
        for _ in range(STEPS):
            played.step()
            peaks.append(report_of(played, get_platform().groups.rank()).peak.live)
        return min(peaks[2:])


# ---- torch's FSDP2 ----
def fully_sharded(
    ranks: int, sections: dict[str, Any], mesh: DeviceMesh
) -> tuple[Any, torch.optim.Optimizer, torch.Tensor]:
    """Return the model under FSDP2, its optimizer, and this rank's samples."""
    model = build_model(plan_of({"dp_shard": ranks}, {}), device="cpu")
    options: dict[str, Any] = {"mesh": mesh}
    if sections == NO_RESHARD:
        options["reshard_after_forward"] = False
    if sections == BFLOAT16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if sections == RECOMPUTE:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)  # FakeTensorMode refuses AdamW on a CPU
    return model, optimizer, torch.zeros(SAMPLES // ranks, LENGTH, dtype=torch.int64)


def one_step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """Train a step."""
    optimizer.zero_grad()
    # Given whole, for transformers reads values to make one, which FakeTensorMode refuses.
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).tril()
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


class LocalLedger(Ledger):
    """Reads what torch's DTensors do with their local tensors, which stand for the memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave a DTensor to itself, whose local tensors then come here."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def torch_peak(ranks: int, sections: dict[str, Any]) -> int:
    """Return the ledger's peak of FSDP2's steps on this rank."""
    with without_collector():
        model, optimizer, tokens = fully_sharded(ranks, sections, init_device_mesh("cpu", (ranks,)))
        ledger = LocalLedger(("cpu",))
        ledger.know([each.to_local() for each in model.parameters()])
        ledger.know(model.buffers())
        peaks = []
        for _ in range(STEPS):
            with ledger:
                ledger.begin("forward")
                one_step(model, optimizer, tokens)
            now = most = sum(ledger.step.start.values())
            for _, _, by in ledger.step.changes:
                now += by
                most = max(most, now)
            peaks.append(most)
        return min(peaks[2:])


def fake_backend_peak(ranks: int, sections: dict[str, Any], peers: StagePeers) -> int:
    """Return the same of one process that plays a rank with torch's fake backend."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return torch_peak(ranks, sections)
    finally:
        dist.destroy_process_group()


def tracker_peak(ranks: int, sections: dict[str, Any], peers: StagePeers) -> int:
    """Return what FSDPMemTracker foretells."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode():
            model, optimizer, tokens = fully_sharded(ranks, sections, mesh)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((tokens,))
            with tracker:
                for _ in range(3):
                    tracker.reset_mod_stats()
                    one_step(model, optimizer, tokens)
            peaks = tracker.get_tracker_snapshot("peak")
        return sum(each["Total"] for each in peaks.values())
    finally:
        dist.destroy_process_group()


# ---- Megatron-LM's formula ----
def megatron(mesh: dict[str, int]) -> int:
    """Return the bytes of the fullest rank by the closed form."""
    hidden, layers, vocabulary = MODEL["hidden_size"], MODEL["num_hidden_layers"], MODEL["vocab_size"]
    inner, tp, pp = MODEL["intermediate_size"], mesh.get("tp", 1), mesh.get("pp", 1)
    samples = SAMPLES // mesh.get("dp_replicate", 1) // (4 if pp > 1 else 1)
    block = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    first = layers // pp * block + vocabulary * hidden
    parameters = (first + (0 if pp > 1 else vocabulary * hidden + hidden)) / tp
    entries = LENGTH * samples * hidden
    # A layer's inputs are kept once for each micro-batch in flight: pp of them on the first stage, of layers / pp each.
    activations = entries * (18 + 4 * inner / hidden) * layers
    activations += 8 * LENGTH * samples * pp + entries * pp
    if pp == 1:
        activations += entries * 4 * (1 + vocabulary / hidden)
    return int(18 * parameters + activations / tp)


def shown(what: str, foretold: int, real: int) -> None:
    """Print one comparison."""
    mib = 1 << 20
    print(
        f"  {what:22} foretold {foretold / mib:8.3f} MiB, real {real / mib:8.3f} MiB, {foretold / real - 1:+8.3%}",
        flush=True,
    )


def alone(task: Any, *args: Any) -> int:
    """Call a function in a process of its own."""
    return play_stages(task, {0: args}, int)[0]


def main() -> None:
    """Compare all of them."""
    torch.set_num_threads(1)
    print("dry_run")
    for name, (mesh, sections) in SHARDED.items():
        plan = plan_of(mesh, sections)
        shown(name, dry_run(plan).peak, max(on_ranks(real_peak, plan.mesh.world_size, plan)))
    for name, (mesh, sections) in MEGATRON.items():
        plan = plan_of(mesh, sections)
        shown(name, dry_run(plan).peak, max(on_ranks(real_peak, plan.mesh.world_size, plan)))
    for what, task in (("FSDPMemTracker", tracker_peak), ("FSDP2 on torch's fake backend", fake_backend_peak)):
        print(what)
        for name, (mesh, sections) in SHARDED.items():
            ranks = mesh["dp_shard"]
            real = max(on_ranks(torch_peak, ranks, ranks, sections))
            shown(name, alone(task, ranks, sections), real)
    print("Megatron-LM's formula")
    for name, (mesh, sections) in MEGATRON.items():
        plan = plan_of(mesh, sections, dtype="bfloat16")
        real = max(on_ranks(real_peak, plan.mesh.world_size, plan))
        shown(name, megatron(mesh), real)


if __name__ == "__main__":
    import bench_foretold  # whose functions other processes can import

    bench_foretold.main()
