"""The simulated pipeline of a plan, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_pipeline.extend import open_forwards
from hp_plan import ParallelPlan
from hp_plan.extend import Choice, Outlook

if TYPE_CHECKING:
    from rich.table import Column, Table


def as_dict(outlook: Outlook) -> dict[str, Any]:
    """Return the numbers of a plan's order, and of a faster one if there is one."""
    return {**_numbers(outlook.choice), "best": None if outlook.best is None else _numbers(outlook.best)}


def _numbers(choice: Choice) -> dict[str, Any]:
    trace, forwards = choice.trace, open_forwards(choice.order)
    stages = [
        {"rank": rank, "blocks": len(stage.blocks), "parameter_bytes": stage.parameters}
        for rank, stage in zip(choice.pipeline.placement, choice.split.stages, strict=True)
    ]
    ranks = [
        {
            "steps": len(choice.order[rank]),
            "busy_seconds": trace.busy[rank],
            "peak_bytes": trace.peaks[rank],
            "forwards_held": forwards[rank],
        }
        for rank in range(choice.pipeline.ranks)
    ]
    return {
        "schedule": choice.name,
        "micro_batches": choice.pipeline.micro_batches,
        "seconds": trace.makespan,
        "bubble_seconds": trace.bubble,
        "bubble_share": trace.bubble_ratio,
        "stages": stages,
        "ranks": ranks,
    }


def title(plan: ParallelPlan, choice: Choice) -> str:
    """Describe an order in a line."""
    rows = plan.data.batch_size // plan.mesh.data_parallel // choice.pipeline.micro_batches
    micro = f"{choice.pipeline.micro_batches} micro-batches of {rows} sample{'s' if rows != 1 else ''}"
    return f"{choice.name} on {plan.mesh.pp} ranks, stages of {_blocks(choice)} blocks, {micro}"


def ranks_table(choice: Choice) -> Table:
    """Make the table of what each rank of the pipeline runs and holds."""
    from rich.table import Table

    table = Table("rank", "stages", "blocks", *(_right(name) for name in _NUMBERS))
    forwards = open_forwards(choice.order)
    for rank, own in enumerate(choice.pipeline.stages):
        blocks = " + ".join(str(len(choice.split.stages[stage].blocks)) for stage in own)
        numbers = len(choice.order[rank]), forwards[rank], f"{choice.trace.peaks[rank] / 2**20:,.1f} MiB"
        table.add_row(str(rank), ", ".join(map(str, own)), blocks, *map(str, numbers))
    return table


def advice(outlook: Outlook) -> str:
    """Name the fastest order at the same memory."""
    choice, best = outlook.choice, outlook.best
    if best is None:
        return "no order was found that is faster at the same memory"
    gain = choice.trace.makespan / best.trace.makespan - 1
    placement = ", ".join(map(str, best.pipeline.placement))
    return (
        f"{gain:.1%} faster at the same memory: stages of {_blocks(best)} blocks on the ranks {placement}, bubble"
        f" {best.trace.bubble_ratio:.1%} (schedule = 'auto' looks for such an order)"
    )


_NUMBERS = ("steps", "forwards held", "peak memory")


def _right(name: str) -> Column:
    from rich.table import Column

    return Column(name, justify="right")


def _blocks(choice: Choice) -> str:
    return ", ".join(str(len(stage.blocks)) for stage in choice.split.stages)
