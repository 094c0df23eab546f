"""Runs the programs of `program_grammar` on one device and on DTensors, and compares every value and gradient."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from program_grammar import Program, draw, inputs
from program_names import namespace, same

from hp_dtensor import (
    DTensor,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
)
from hp_platform import get_platform
from hp_testing import device_type

CRASHES = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NameError,
    RecursionError,
    SystemError,
    UnboundLocalError,
)
"""Errors that no user can act on."""
UNABLE = (RuntimeError, TypeError, AttributeError)
"""Errors of one device's backward: it can't run there, or a hook meets a gradient that is None."""
TOLERANCE = 1e-9
Tensors = dict[str, torch.Tensor]


@dataclass
class Verdict:
    """How a program did on this rank.

    Attributes:
        program: its number.
        compared: values and gradients that were compared with one device's.
        refused: the errors that were raised, each with the line that raised it; such lines are left out.
        crashed: those of them that no user can act on, with their traceback.
        wrong: the first difference, with the program; None where there is none.
        unsteady: there is a difference, and on one device the last digits of the inputs make one as well.
    """

    program: int
    compared: int = 0
    refused: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    wrong: str | None = None
    unsteady: bool = False


class LineError(Exception):
    """A line that raised: its index, or None where it was the backward or the reading of results."""

    def __init__(self, index: int | None, error: Exception) -> None:
        super().__init__(index, error)
        self.index, self.error = index, error


def placements(codes: tuple[str, ...], shape: torch.Size, mesh_shape: tuple[int, ...]) -> list[Placement]:
    """``("S0", "R")`` as placements; a RaggedShard leaves all ranks but the first and the last without elements."""
    made: list[Placement] = []
    for code, size in zip(codes, mesh_shape, strict=True):
        if code == "G":
            first = shape.numel() // 2 if size > 1 else 0
            units = [first, *[0] * (size - 2), shape.numel() - first][-size:]
            made.append(RaggedShard(tuple(range(len(shape))), tuple(units)))
        else:
            made.append(Shard(int(code[1:])) if code[0] == "S" else Replicate() if code == "R" else Partial())
    return made


def run_plain(program: Program, shaken: int = 0) -> Tensors:
    """Every value and every gradient of a program on one device, by name.

    Args:
        program: the lines.
        shaken: where not 0, draws a change of the inputs in their last digits.
    """
    space = {**namespace(), **inputs(program, shaken)}
    for line in program.lines:
        exec(line, space)
    return _results(program, space)


def run_distributed(program: Program, mesh: Any) -> Tensors:
    """The same on DTensors; those with parts of a reduction are gathered.

    Raises:
        LineError: a line, the backward or the reading of results raised.
    """

    def move(x: Any, *to: str) -> Any:
        if not isinstance(x, DTensor):
            return same(x)
        return x.redistribute(placements=placements(to, x.shape, mesh.shape))

    def through_local(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return same(x)
        return DTensor.from_local(x.to_local(), mesh, x.placements, shape=x.shape)

    def through_full(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return same(x)
        return DTensor.from_local(x.full_tensor(), mesh, [Replicate()] * mesh.ndim, shape=x.shape)

    def local(x: Any) -> Any:
        if isinstance(x, DTensor) and not any(p.is_partial("product") for p in x.placements):
            return x.to_local()
        return x  # half of each factor is not half of the product

    plain = inputs(program)
    space = namespace(move, through_local, through_full, local)
    for leaf in program.leaves:
        whole = plain[leaf.name].detach().to(mesh.device_type)
        wanted = placements(leaf.placements, whole.shape, mesh.shape)
        placed = distribute_tensor(whole, mesh, wanted, src_data_rank=None)
        space[leaf.name] = placed.requires_grad_(leaf.requires_grad)
    for index, line in enumerate(program.lines):
        try:
            exec(line, space)
        except Exception as error:
            raise LineError(index, error) from error
    try:
        return {name: _readable(value.detach()) for name, value in _results(program, space).items()}
    except Exception as error:
        raise LineError(None, error) from error


def _readable(value: Any) -> torch.Tensor:
    """``value`` gathered, unless each rank can compare its own part: a collective takes most of a program's time."""
    if isinstance(value, DTensor) and any(type(p) not in (Replicate, Shard, RaggedShard) for p in value.placements):
        return value.full_tensor()
    return value


def _results(program: Program, space: dict[str, Any]) -> Tensors:
    """Values first, then the gradients, as the program's mode takes them."""
    values = {name: value for name, value in space.items() if name[0] == "v" and isinstance(value, torch.Tensor)}
    found: Tensors = {name: value.detach().clone() for name, value in values.items()}
    if not program.roots or program.mode == "none":
        return found
    loss = sum(_weighed(space[root]) for root in program.roots)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return found
    watched = [leaf.name for leaf in program.leaves if leaf.requires_grad]
    leaves = [space[name] for name in watched]
    if program.mode in ("backward", "twice"):
        loss.backward(retain_graph=program.mode == "twice")
        if program.mode == "twice":
            loss.backward()
        gradients = [value.grad for value in leaves]
        for name, value in values.items():
            if value.retains_grad and value.grad is not None:
                found[f"{name}'s retained gradient"] = value.grad
    else:
        double = program.mode == "double"
        gradients = list(torch.autograd.grad(loss, leaves, create_graph=double, allow_unused=True))
        again = [gradient.square().sum() for gradient in gradients if double and gradient is not None]
        if again and any(value.requires_grad for value in again):
            found |= _named("first gradient", watched, gradients)
            gradients = list(torch.autograd.grad(sum(again), leaves, allow_unused=True))
    return found | _named("gradient", watched, gradients)


def _named(kind: str, names: list[str], gradients: list[Any]) -> Tensors:
    return {f"{name}'s {kind}": gradient for name, gradient in zip(names, gradients) if gradient is not None}


def _weighed(value: torch.Tensor) -> torch.Tensor:
    """A scalar that tells every element from every other."""
    with torch.no_grad():
        ramp = torch.arange(value.numel(), dtype=value.dtype, device=value.device).add(1).cos().reshape(value.shape)
    return (value * ramp).sum() + 0.1 * value.square().sum()


def difference(got: Tensors, wanted: Tensors) -> str | None:
    """The first value or gradient that differs on this rank; a gradient that is not there is one of zeros."""
    for name in {**wanted, **got}:
        have, want = got.get(name), wanted.get(name)
        if have is None or want is None:
            other = want if have is None else have
            if "gradient" in name and other is not None and not other.detach().abs().sum().item():
                continue
            return f"{name} is there on {'one device' if have is None else 'DTensors'} alone"
        if have.shape != want.shape or have.dtype != want.dtype:
            return f"{name} is {tuple(have.shape)} {have.dtype}, one device's is {tuple(want.shape)} {want.dtype}"
        if not want.numel():
            continue
        largest = max(1.0, want.abs().max().item())
        if isinstance(have, DTensor):
            want = distribute_tensor(want.detach(), have.device_mesh, have.placements, src_data_rank=None).to_local()
            have = have.to_local()
            if have.shape != want.shape:
                return f"{name}'s part is {tuple(have.shape)}, it should be {tuple(want.shape)}"
        worst = (have - want).abs().cpu().max().item() / largest if want.numel() else 0.0
        if not worst < TOLERANCE:
            return f"{name} differs by {worst:.3g}"
    return None


@functools.lru_cache(4000)
def drawn(seed: int, axes: int, steps: int = 14, calm: bool = False) -> Program:
    """`draw`, with a gradients' mode that one device can do: in-place writes may rule some out.

    Where they rule out all, as on a leaf that needs a gradient, another program is drawn in its place.
    """
    for attempt in range(10):
        program = draw(seed + 10_000_019 * attempt, axes, steps, calm)
        for mode in (program.mode, "backward", "none"):
            try:
                settled = replace(program, mode=mode)
                results = run_plain(settled)
            except UNABLE:
                continue
            if mode == "none" or all(_is_moderate(value) for value in results.values()):
                return settled
    raise AssertionError(f"one device can't run any of 10 programs, the last:\n{program}")


def _is_moderate(value: torch.Tensor) -> bool:
    return bool((value.detach().abs() < 1e6).all())


def is_steady(program: Program, wanted: Tensors) -> bool:
    """Whether one device's own results stay when its inputs change in their last digits.

    Where a value lies at a jump, say ``x - x.mean() > 0`` of equal elements, rounding decides what comes out.
    """
    for shaken in (1, 2, 3):
        try:
            if difference(run_plain(program, shaken), wanted) is not None:
                return False
        except (*UNABLE, IndexError):
            return False
    return True


def judge(program: Program, mesh: Any, notes: Path | None = None) -> Verdict:
    """Runs a program; a line that is refused is left out, with what depends on it, and the rest runs again.

    Args:
        program: the lines.
        mesh: the mesh of all ranks.
        notes: a file for this rank's refusals, to read where the ranks then hang.
    """
    verdict = Verdict(program.seed)
    for _ in range(len(program.lines) + 3):
        try:
            wanted = run_plain(program)
        except UNABLE:  # without a line that was left out, one device may refuse the gradient
            program = replace(program, mode="none")
            wanted = run_plain(program)
        get_platform().collectives.barrier()  # a rank that raised alone stops here, not in another program
        try:
            with implicit_replication():
                got = run_distributed(program, mesh)
        except LineError as failure:
            line = program.mode if failure.index is None else program.lines[failure.index]
            text = str(failure.error).strip().splitlines()
            told = f"{type(failure.error).__name__}: {text[0] if text else ''} [{line}]"
            verdict.refused.append(told)
            if notes is not None:
                notes.write_text("\n".join(verdict.refused))
            if isinstance(failure.error, CRASHES):
                verdict.crashed.append(f"{told}\n{program}\n{''.join(traceback.format_exception(failure.error))}")
            if failure.index is not None:
                program = program.without(failure.index)
            elif program.mode != "none":
                program = replace(program, mode="none")
            else:  # a value that may not be read: see which
                program = program.without(len(program.lines) - 1)
            continue
        wrong = difference(got, wanted)
        verdict.compared = len(wanted)
        if wrong is not None and not is_steady(program, wanted):
            verdict.unsteady = True
        elif wrong is not None:
            verdict.wrong = f"{wrong}\n{program}"
        return verdict
    raise AssertionError(f"each line was refused:\n{program}")


def judge_all(programs: list[Program], mesh_shape: tuple[int, ...], progress: str | None = None) -> list[Verdict]:
    """`judge` programs: what a pool's rank runs.

    Args:
        programs: from `drawn`, for as many axes as the mesh has.
        mesh_shape: the mesh of all ranks.
        progress: a file to which rank 0 writes how many programs are done, for who ends a rank that hangs; what each
            rank refused of the present one is beside it, in a file with the rank's number as its suffix.
    """
    torch.set_num_threads(1)
    mesh = init_device_mesh(device_type(), mesh_shape)
    verdicts = []
    for done, program in enumerate(programs):
        notes = None
        if progress is not None:
            notes = Path(f"{progress}.{mesh.get_rank()}")
            notes.unlink(missing_ok=True)
            if mesh.get_rank() == 0:
                Path(progress).write_text(str(done))
        verdicts.append(judge(program, mesh, notes))
    return verdicts


def shorten(program: Program, mesh_shape: tuple[int, ...]) -> str:
    """The text of the program with fewer lines that is still wrong, on any rank; every rank finds the same one."""
    mesh = init_device_mesh(device_type(), mesh_shape)

    def wrong(candidate: Program) -> bool:
        found = torch.zeros((), device=mesh.device_type)
        with contextlib.suppress(Exception):
            wanted = run_plain(candidate)
            with implicit_replication():
                found += difference(run_distributed(candidate, mesh), wanted) is not None
        torch.distributed.all_reduce(found)
        return bool(found)

    index = len(program.lines) - 1
    while index >= 0:
        shorter = program.without(index)
        if wrong(shorter):
            program = shorter
        index = min(index, len(program.lines)) - 1
    return str(program)


@dataclass
class Counts:
    """What many programs did."""

    programs: int = 0
    right: int = 0
    unsteady: int = 0
    compared: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    crashed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Counts one program's verdict."""
        self.programs += 1
        self.compared += verdict.compared
        self.right += verdict.wrong is None and not verdict.crashed and not verdict.unsteady
        self.unsteady += verdict.unsteady
        self.refused.update(verdict.refused)
        self.crashed += verdict.crashed
        if verdict.wrong is not None:
            self.wrong.append(verdict.wrong)
