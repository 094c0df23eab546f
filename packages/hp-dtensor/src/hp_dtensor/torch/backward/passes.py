"""Backward passes as they begin: what takes part in them, and says why they failed.

Note [Marks]
    The engine runs the youngest node that is ready. So a node that was made right after the forward of a module, and is
    a root of the pass, runs after all younger nodes and before all that the forward made, wherever the pass enters the
    module: by its output, by a tensor that a hook kept, or by an output that was written in place. Such a root is a
    mark. It has no elements, and whether the pass needs anything of its module is the engine's to say (`will_run`).

    A pass of ``torch.autograd.grad`` runs only what leads to its inputs, so the leaf of the marks is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import graph

_backward_id = torch._C._current_graph_task_id  # type: ignore[attr-defined]
_transform = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]
_will_run = torch._C._will_engine_execute_node  # type: ignore[attr-defined]
_engine = graph._engine_run_backward
_leaves: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
marks: list[Callable[[], Iterable[Mark]]] = []
"""Of those that take part in backward passes: called as a pass begins; they return their marks."""
explaining: list[Callable[[RuntimeError], RuntimeError | None]] = []
"""Called with an error of a pass; one that knows why returns the error to raise from it."""


class Mark:
    """A node that is younger than all that this thread has made; see Note [Marks].

    Args:
        device: of the computation, whose thread of the engine runs the node.
        reached: called when a pass has come there.
    """

    __slots__ = ("device", "root")

    def __init__(self, device: torch.device, reached: Callable[..., None]) -> None:
        self.device = device
        if device not in _leaves:
            with torch.inference_mode(False):
                leaf = torch.empty(0, device=device, requires_grad=True)
                _leaves[device] = leaf, leaf.detach()
        self.root = _leaves[device][0].view(0)
        self.root.grad_fn.register_prehook(reached)  # type: ignore[union-attr]


def will_run(node: Any) -> bool:
    """Tell whether the pass under way comes to a leaf's node, as `torch.autograd.graph.get_gradient_edge` gives it."""
    try:
        return _will_run(node)
    except RuntimeError:  # it is an input of torch.autograd.grad
        return True


def _apart() -> bool:
    """Tell whether a pass that begins is a part of another one, as a checkpoint's, or of a trace, without values."""
    return _backward_id() != -1 or _transform() is not None or _mode(_FAKE) is not None


def run(outputs: Any, gradients: Any, retain: bool, create: bool, inputs: Any, *rest: Any, **options: Any) -> Any:
    """Run the engine, as torch's function of this signature does, with the marks among the roots."""
    found = [] if _apart() else [mark for each in marks for mark in each()]
    try:
        if not found:
            return _engine(outputs, gradients, retain, create, inputs, *rest, **options)
        roots = [mark.root for mark in found]
        outputs, gradients = (*outputs, *roots), (*gradients, *(_leaves[mark.device][1] for mark in found))
        if not inputs:
            return _engine(outputs, gradients, retain, create, inputs, *rest, **options)
        leaves = [_leaves[device][0] for device in {mark.device for mark in found}]
        results = _engine(outputs, gradients, retain, create, (*inputs, *leaves), *rest, **options)
        return results[: len(inputs)]
    except RuntimeError as error:
        for explain in explaining:
            other = explain(error)
            if other is not None:
                raise other from error
        raise


def install() -> None:
    """Have torch's functions begin their passes here."""
    torch.autograd._engine_run_backward = graph._engine_run_backward = run  # type: ignore[attr-defined]
