"""Count the files that a value passes on its way through the source: how far a reader has to follow it.

    python docs/walks.py              the figures of each walk
    python docs/walks.py matmul       one of them, with its files in the order in which they are entered first

It needs torch and transformers, and the packages' src folders on PYTHONPATH. A *file* is one with a function that runs,
a *move* a call or a return from one file into another. For `apply`, a *stay* is a call of a function that is given the
plan, and a *return* a stay in a file that the plan was in before and has left since. All but the first matmul are
walked the second time in a process: imports and what is made once are left out.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any


@dataclass
class Walk:
    """The files that a call passes."""

    value: object = None
    files: dict[str, None] = field(default_factory=dict)
    moves: int = 0
    stays: list[str] = field(default_factory=list)

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a call, and note where it goes."""
        sys.setprofile(self._note)
        try:
            return call()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return") or (file := _file(frame)) is None:
            return
        self.files.setdefault(file)
        caller = frame.f_back
        while caller is not None and _file(caller) is None:
            caller = caller.f_back
        self.moves += caller is not None and _file(caller) != file
        if event == "call" and self.value is not None:
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            if any(frame.f_locals.get(name) is self.value for name in names):
                self.stays.append(file)

    @property
    def returns(self) -> int:
        """Count the stays in a file that was left before."""
        seen, found = set[str](), 0
        for before, file in zip([None, *self.stays], self.stays, strict=False):
            found += file != before and file in seen
            seen.add(file)
        return found

    def __str__(self) -> str:
        """Write the figures in a line."""
        stays = f", {len(self.stays)} stays, {self.returns} returns" if self.stays else ""
        return f"{len(self.files)} files, {self.moves} moves{stays}"


def _file(frame: FrameType) -> str | None:
    """Return the name of a frame's file below `packages/*/src`; None for others."""
    found = _files.get(frame.f_code.co_filename, "")
    if found == "":
        parts = Path(frame.f_code.co_filename).parts
        own = "src" in parts and "packages" in parts
        found = _files[frame.f_code.co_filename] = "/".join(parts[parts.index("src") + 1 :]) if own else None
    return found


_files: dict[str, str | None] = {}


def walks() -> Iterator[tuple[str, Walk]]:
    """Walk each, on the first of four ranks that a fake process group pretends."""
    import torch  # noqa: TID251
    from torch import nn  # noqa: TID251
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: TID251

    import hp_checkpoint
    import hp_dtensor
    import hp_fsdp
    import hp_plan

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = hp_dtensor.init_device_mesh("cpu", (4,))
    x, w = (
        hp_dtensor.distribute_tensor(torch.ones(64, 64), mesh, [hp_dtensor.Shard(dim)]).requires_grad_()
        for dim in (0, 1)
    )
    for name in ("matmul, first", "matmul"):
        walk = Walk()
        out = walk.run(lambda: x @ w)
        yield name, walk
    walk, gradient = Walk(), torch.ones_like(out)
    walk.run(lambda: out.backward(gradient))
    yield "matmul, backward", walk

    for _ in range(2):
        walk, model = Walk(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        walk.run(lambda model=model: hp_fsdp.fully_shard(model, mesh))
    yield "fully_shard", walk
    for name in ("forward", "backward"):
        model(torch.ones(2, 8)).sum().backward()
        walk, loss = Walk(), model(torch.ones(2, 8)).sum()
        walk.run(loss.backward if name == "backward" else lambda: model(torch.ones(2, 8)))
        yield f"fully_shard, {name}", walk

    state = {"x": torch.ones(64, 64)}
    with tempfile.TemporaryDirectory() as folder:
        hp_checkpoint.save(state, checkpoint_id=f"{folder}/1", no_dist=True)
        walk = Walk()
        walk.run(lambda: hp_checkpoint.save(state, checkpoint_id=f"{folder}/2", no_dist=True))
    yield "save", walk

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    table = {"model": {"config": "Qwen3Config", "overrides": sizes}, "mesh": {"dp_shard": 2, "tp": 2}}
    plan = hp_plan.ParallelPlan.from_dict(table)
    for _ in range(2):
        model, walk = hp_plan.build_model(plan), Walk(value=plan)
        walk.run(lambda model=model: hp_plan.apply(model, plan))
    yield "apply", walk


def main() -> None:
    """Print the walks."""
    for name, walk in walks():
        if len(sys.argv) < 2:
            print(f"{name}: {walk}")
        elif name == " ".join(sys.argv[1:]):
            print(f"{name}: {walk}", *(f"    {file}" for file in walk.files), sep="\n")


if __name__ == "__main__":
    main()
