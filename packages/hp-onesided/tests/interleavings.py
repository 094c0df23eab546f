"""All interleavings of processes that count up, wait for each other's counts, and read each other's memory.

What a process has written and posted depends on how far it is, and on nothing else: each writes to its own memory
alone. So a state is how far each process is, and whatever can happen is seen by going through all states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_onesided.planning.steps import GRAIN, Program, rounds_for

TORN = "torn"


@dataclass
class Action:
    """One thing that a process does.

    Attributes:
        name: for messages.
        needs: pairs of a process and how far it has to be.
        reads: a process, a place of its memory, and what has to be there.
        writes: to the own memory.
    """

    name: str
    needs: list[tuple[int, int]] = field(default_factory=list)
    reads: list[tuple[int, Any, Any]] = field(default_factory=list)
    writes: dict[Any, Any] = field(default_factory=dict)


def explore(processes: Sequence[Sequence[Action]]) -> str | None:
    """Go through all interleavings; tell of the first wrong read or deadlock, None if there is none."""
    memories: list[list[dict[Any, Any]]] = []
    for actions in processes:
        memory: dict[Any, Any] = {}
        memories.append([memory])
        for action in actions:
            memory = {**memory, **action.writes}
            memories[-1].append(memory)
    lengths = [len(actions) for actions in processes]
    start = (0,) * len(processes)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        moved = False
        for index, at in enumerate(state):
            if at == lengths[index]:
                continue
            action = processes[index][at]
            if any(state[other] < least for other, least in action.needs):
                continue
            for other, place, expected in action.reads:
                found = memories[other][state[other]].get(place)
                if found != expected:
                    return f"process {index}: {action.name} finds {found} at {place} of {other}, expected {expected}"
            moved = True
            after = (*state[:index], at + 1, *state[index + 1 :])
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if not moved and any(at < length for at, length in zip(state, lengths)):
            return f"deadlock at {state}"
    return None


@dataclass
class Operation:
    """A collective of all ranks.

    Attributes:
        programs: of each rank.
        wanted: what has to be in a cell of a rank's output, and what an input's cell is: `(rank, cell)`; a sum is the
            cell alone.
        counts: bytes from each rank to each, of an all-to-all.
    """

    programs: Sequence[Program]
    wanted: Callable[[int, int], Any]
    counts: Sequence[Sequence[int]] = ()

    @property
    def rounds(self) -> int:
        """How often the steps are done."""
        return self.programs[0].rounds or rounds_for(self.counts, self.programs[0].chunk)


def actions_of(
    operations: Sequence[Operation],
    ranks: int,
    processes: Mapping[int, int],
    without: Callable[..., bool] | None = None,
) -> list[list[Action]]:
    """Write the actions of each rank's steps; writes and reads have two halves.

    Args:
        operations: one after the other.
        ranks: how many.
        processes: the number of each rank's process, as `explore` counts them.
        without: told rank, number of the operation, round and peer of a wait; true leaves it out.
    """
    made = [_actions(rank, operations, ranks, processes, without) for rank in range(ranks)]
    posts = [[at + 1 for at, action in enumerate(actions) if action.name == "post"] for actions, _ in made]
    for _, waits in made:
        for action, peer, count in waits:
            action.needs.append((processes[peer], posts[peer][count - 1]))
    return [actions for actions, _ in made]


def _actions(rank, operations, ranks, processes, without):
    actions: list[Action] = []
    waits: list[tuple[Action, int, int]] = []
    count = 0

    def write(name: str, cells: Mapping[Any, Any]) -> None:
        actions.append(Action(name, writes=dict.fromkeys(cells, TORN)))
        actions.append(Action(name, writes=dict(cells)))

    for number, operation in enumerate(operations):
        program = operation.programs[rank]
        write("call", {("header", (count + 1) % 2): number})
        for turn in range(operation.rounds):
            for step in program.steps:
                here, there = count % 2, (count + 1) % 2
                at, own, nbytes = step.span(turn)
                first, cells = step.slot // GRAIN, range(-(-nbytes // GRAIN))
                if step.kind == "post":
                    count += 1
                    actions.append(Action("post"))
                elif step.kind == "wait":
                    if without is None or not without(rank, number, turn, step.peer):
                        actions.append(Action(f"wait for {step.peer}"))
                        waits.append((actions[-1], step.peer, count))
                elif step.kind == "check":
                    if turn == 0:
                        reads = [(processes[peer], ("header", here), number) for peer in range(ranks)]
                        actions.append(Action("check", reads=reads))
                elif not cells:
                    continue
                elif step.kind == "copy_in":
                    write("copy_in", {(there, first + cell): (number, rank, at // GRAIN + cell) for cell in cells})
                elif step.kind == "copy_out":
                    wanted = [operation.wanted(rank, at // GRAIN + cell) for cell in cells]
                    reads = [
                        (processes[step.peer], (here, first + cell), (number, *_value(want)))
                        for cell, want in zip(cells, wanted)
                    ]
                    actions.extend(Action("copy_out", reads=reads) for _ in range(2))
                elif step.kind == "copy":
                    for cell in cells:
                        assert operation.wanted(rank, at // GRAIN + cell) == (rank, own // GRAIN + cell)
                else:
                    reduced = [own // GRAIN + cell for cell in cells]
                    reads = [
                        (processes[peer], (here, first + cell), (number, peer, place))
                        for peer in range(ranks)
                        if peer != rank
                        for cell, place in zip(cells, reduced)
                    ]
                    actions.extend(Action(step.kind, reads=reads) for _ in range(2))
                    if step.kind == "reduce":
                        assert [operation.wanted(rank, at // GRAIN + cell) for cell in cells] == reduced
                    else:
                        write(
                            "reduce_in", {(there, first + cell): (number, place) for cell, place in zip(cells, reduced)}
                        )
    return actions, waits


def _value(want: Any) -> tuple[Any, ...]:
    return want if isinstance(want, tuple) else (want,)
