"""The module of a torch program that communicates.

Note [Modules by sequence number]
Autograd numbers its nodes in order of creation. Hooks before and after each forward record the next number, so that the
number of a node in backward tells in which module's forward it was created. Nothing is added to the graph, and it works
in autograd's own threads. (Full backward hooks would add nodes around each module.)
The hook after forward must be the module's last one, because other hooks may communicate as well. Therefore it is
registered anew each time the module's forward begins.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from hp_dtensor.debugging.debug import Names, running
from hp_platform.extend import attributed_modules

_graph_task = torch._C._current_graph_task_id  # type: ignore[attr-defined]
_node = torch._C._current_autograd_node  # type: ignore[attr-defined]
_next_number = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
_NEVER = 2**64


@dataclass
class _Calls:
    """The forwards of a thread: names, first and last node numbers, enclosing calls, and the backwards they ran in."""

    names: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    around: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    stack: list[tuple[int, torch.nn.Module]] = field(default_factory=list)

    def begin(self, module: torch.nn.Module, name: str) -> None:
        """Record that a forward begins."""
        self.around.append(self.stack[-1][0] if self.stack else -1)
        self.stack.append((len(self.names), module))
        self.names.append(name)
        self.starts.append(_next_number())
        self.stops.append(_NEVER)
        self.tasks.append(_graph_task())

    def end(self, module: torch.nn.Module) -> None:
        """Record that a forward has ended, and with it all that it called."""
        if any(each is module for _, each in self.stack):
            ended = None
            while ended is not module:
                index, ended = self.stack.pop()
                self.stops[index] = _next_number()

    def of(self, number: int) -> str | None:
        """Return the innermost module in whose forward the node of this number was created."""
        index = bisect_right(self.starts, number) - 1
        while index >= 0 and self.stops[index] <= number:
            index = self.around[index]
        return self.names[index] if index >= 0 else None


class Modules:
    """The running modules: Note [Modules by sequence number]."""

    def __init__(self) -> None:
        self._names = Names(lambda root: dict(root.named_modules()))
        self._calls: dict[int, _Calls] = {}
        self._hooks: dict[torch.nn.Module, Any] = {}
        self._global: Any = None

    def start(self) -> None:
        """Watch the modules that run."""
        self._global = register_module_forward_pre_hook(self._begin)

    def stop(self) -> None:
        """Remove all hooks, and end the forwards that still run."""
        self._global.remove()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for calls in self._calls.values():
            while calls.stack:
                calls.end(calls.stack[-1][1])

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        calls = self._calls.setdefault(threading.get_ident(), _Calls())
        if all(each is not module for _, each in calls.stack):  # a module that calls itself keeps its hook
            if module in self._hooks:
                self._hooks[module].remove()
            self._hooks[module] = module.register_forward_hook(self._end, always_call=True)
        calls.begin(module, self._names.of([module, *(each for _, each in reversed(calls.stack))]))

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        calls = self._calls.get(threading.get_ident())
        if calls is not None:
            calls.end(module)

    def place(self, frame: FrameType) -> tuple[str, str]:
        """Return phase and module of the program at this frame."""
        task, attributed = _graph_task(), attributed_modules()
        if attributed:
            return "forward" if task == -1 else "backward", self._names.of(attributed)
        if task == -1:
            return "forward", self._names.of(running(frame, torch.nn.Module))
        calls = self._calls.get(threading.get_ident())
        if calls is not None and calls.stack:
            top = calls.stack[-1][0]
            if calls.tasks[top] == task:  # a forward that is recomputed for this backward
                return "backward", calls.names[top]
        node = _node()
        names = [each.of(node._sequence_nr()) for each in self._calls.values()] if node is not None else []
        modules = {name for name in names if name is not None}
        return "backward", modules.pop() if len(modules) == 1 else ""  # each thread numbers for itself
