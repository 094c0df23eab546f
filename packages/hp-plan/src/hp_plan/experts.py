"""Experts over ranks: the axis `ep`, a second view of the ranks that share a copy of the model."""

from __future__ import annotations

from hp_plan.diagnostics import Diagnostic
from hp_plan.plan import ParallelPlan

__all__ = ["check_expert_axis"]


def check_expert_axis(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that `ep` divides the ranks that share a copy of the model, and goes with `tp`.

    Tensor parallel ranks have the same tokens. Either experts are spread over all of them, each of which then sends a
    share of the tokens, or each has a part of the features of the same experts.
    """
    mesh = plan.mesh
    if mesh.ep == 1:
        return []
    sizes = {"dp_shard": mesh.dp_shard, "cp": mesh.cp, "tp": mesh.tp}
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "dp_shard 1"
    if mesh.sharing % mesh.ep:
        message = f"ep = {mesh.ep} does not divide the ranks that share a copy of the model, {product}"
        product = f"{message} = {mesh.sharing}" if " x " in product else message
        divisors = [number for number in range(2, mesh.sharing + 1) if mesh.sharing % number == 0]
        choices = f"make it one of {', '.join(map(str, divisors))}, or " if divisors else ""
        fix = f"{choices}raise mesh.dp_shard: experts are spread over ranks that the mesh has already"
        return [Diagnostic("mesh.ep", product, fix)]
    samples = mesh.sharing // mesh.tp
    if mesh.ep % mesh.tp and samples % mesh.ep:
        message = f"ep = {mesh.ep} is neither a multiple of tp = {mesh.tp} nor a divisor of the other {samples} ranks"
        fix = f"make it a multiple of {mesh.tp} that divides {mesh.sharing}, such as {mesh.tp}, or raise mesh.dp_shard"
        return [Diagnostic("mesh.ep", message, fix)]
    return []
