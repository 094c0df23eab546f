"""Runs a model family under a plan against one process, in float64: loss and every gradient."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, IMAGE_TOKEN, Family

from hp_dtensor import DTensor
from hp_plan import ParallelPlan, PlanError, apply, build_model
from hp_plan.torch.compared import Float64

TOLERANCE = 1e-10
FLOOR = 1e-5  # A gradient below this part of the largest is compared as if it were this large: k_proj.bias has none.


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way of running a family: axes of the mesh, styles, and samples of different lengths or not."""

    mesh: dict[str, int]
    styles: str = "auto"
    padded: bool = False

    @property
    def ranks(self) -> int:
        """How many it runs on."""
        return ParallelPlan.from_dict({"mesh": self.mesh}).mesh.world_size


CELLS = {
    "fsdp 2": Cell({"dp_shard": 2}),
    "fsdp 3": Cell({"dp_shard": 3}),
    "hsdp": Cell({"dp_replicate": 2, "dp_shard": 2}),
    "tp 2": Cell({"tp": 2}),
    "tp 2, sequence": Cell({"tp": 2}, styles="auto-sequence"),
    "fsdp 2 x tp 2": Cell({"dp_shard": 2, "tp": 2}),
    "padded, tp 2": Cell({"tp": 2}, padded=True),
}


def plan_of(family: Family, cell: Cell, groups: tuple[str, ...] = ()) -> ParallelPlan:
    """The plan of a cell."""
    model = {"config": family.config, "overrides": family.overrides} | ({"task": family.task} if family.task else {})
    tables: dict[str, Any] = {"model": model, "mesh": cell.mesh, "styles": cell.styles, "run": {"dtype": "float64"}}
    tables["data"] = {"sequence_length": 8}
    if "dp_shard" in cell.mesh:
        tables["fsdp"] = {"groups": list(groups)}
    return ParallelPlan.from_dict(tables)


def judge(name: str, cell_name: str) -> dict[str, Any]:
    """Runs one cell on this rank; `verdict`, `worst` difference, `detail`, and which part of the weights is sharded."""
    family, cell = FAMILIES[name], CELLS[cell_name]
    try:
        with Float64():
            return _compare(family, cell)
    except PlanError as error:
        return {"verdict": "refused", "detail": str(error.diagnostics[0])}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = frames[-1].filename.rpartition("/src/")[2].startswith(("hp_", "hyper_parallel"))
        kind = "refused" if ours and isinstance(error, (NotImplementedError, ValueError, RuntimeError)) else "crash"
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-7:-1])
        return {"verdict": kind, "detail": f"{type(error).__name__}: {error} ({where})"}


def _compare(family: Family, cell: Cell) -> dict[str, Any]:
    single = _model(plan_of(family, cell))
    groups = _blocks(single)
    plan = plan_of(family, cell, groups)
    parallel = apply(_model(plan), plan)
    parts = plan.mesh.data_parallel
    batches = [_batch(family, part, cell.padded) for part in range(parts)]
    expected = [_loss(single, batch) / parts for batch in batches]
    torch.stack(expected).sum().backward()
    mine = torch.distributed.get_rank() // (plan.mesh.world_size // parts)
    got = _loss(parallel, batches[mine])
    got.backward()
    total = got.detach().clone()
    torch.distributed.all_reduce(total)
    truth = sum(value.item() for value in expected)
    worst, where = abs(total.item() / plan.mesh.world_size - truth) / abs(truth), "loss"
    single_gradients = {key: _gradient(value) for key, value in single.named_parameters()}
    floor = FLOOR * max(value.abs().max().item() for value in single_gradients.values())
    for key, parameter in parallel.named_parameters():
        one = single_gradients[key]
        difference = (_gradient(parameter) - one).abs().max().item() / max(one.abs().max().item(), floor)
        if not difference <= worst:
            worst, where = difference, key
    verdict = "right" if worst <= TOLERANCE else "wrong"
    return {"verdict": verdict, "worst": worst, "detail": where, "sharded": _sharded(parallel, cell)}


def _model(plan: ParallelPlan) -> torch.nn.Module:
    """Its model for training, no weight zero or one, so that a bias that is added twice shows."""
    model = build_model(plan).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def _blocks(model: torch.nn.Module) -> tuple[str, ...]:
    """Patterns of the members of the outermost lists of modules."""
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return tuple(f"{name}.*" for name in outer)


def _batch(family: Family, part: int, padded: bool) -> dict[str, Any]:
    assert family.inputs is not None
    batch = dict(family.inputs(2, torch.Generator().manual_seed(100 + part)))
    if padded:
        ids = batch.get("input_ids")
        if ids is not None:
            mask = torch.ones_like(ids)
            mask[1, -3:] = 0
            if not bool((ids == IMAGE_TOKEN).any()):
                mask[0, :2] = 0
            batch["attention_mask"] = mask
        if "labels" in batch:
            labels = batch["labels"] = batch["labels"].clone()
            labels[1, -3:] = -100
            if ids is not None and labels.shape == ids.shape:
                labels[mask == 0] = -100
    return batch


def _loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)  # A router may draw noise.
    output = model(**{key: value.clone() if torch.is_tensor(value) else value for key, value in batch.items()})
    return output["loss"]


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    if gradient is None:
        return torch.zeros_like(whole)
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _sharded(model: torch.nn.Module, cell: Cell) -> float | None:
    """Which part of the weights is cut over the tensor parallel ranks."""
    if "tp" not in cell.mesh:
        return None
    whole = sum(parameter.numel() for parameter in model.parameters())
    cut = sum(
        parameter.numel()
        for parameter in model.parameters()
        if isinstance(parameter, DTensor) and not parameter.placements[-1].is_replicate()
    )
    return cut / whole
