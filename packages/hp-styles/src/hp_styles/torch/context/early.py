"""Keys that are sent as soon as they have been projected, before the module that reads them runs.

Note [Blocks]
    A style of this kind is on the module that holds both. A hook before its forward opens a block, projections inside
    put what they send there, and the core takes it out; a hook after it, which is called on an error too, closes it. A
    core that runs with no block open (recomputed alone, under activation checkpointing) sends its keys itself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor
from hp_styles.pickling import hook
from hp_styles.torch.context.arguments import refuse_compiled
from hp_styles.torch.context.gather import Gathering, Whole

__all__ = ["Blocks", "register"]

T = torch.Tensor


@dataclass
class _Block:
    """A module that runs.

    Attributes:
        sources: by the name of a projection, its output, and the version of that, which tells of writes.
        arriving: those on their way.
        arrived: those whose whole was taken.
        done: the core has run.
    """

    sources: dict[str, tuple[T, int]] = field(default_factory=dict)
    arriving: dict[str, Gathering] = field(default_factory=dict)
    arrived: dict[str, T] = field(default_factory=dict)
    done: bool = False


class Blocks(threading.local):
    """The blocks that are open on this thread, of one style on one module, and what they take and give.

    Args:
        plan: between which ranks, on which dim.
        style: the name of the style, for errors.
        projections: for keys, the name of the submodule whose output it is.
    """

    def __init__(self, plan: Whole, style: str, projections: Mapping[str | int, str]) -> None:
        self.plan, self.style, self.projections = plan, style, projections
        self.open: list[_Block] = []

    def close(self) -> None:
        """Leaves the innermost block, with nothing under way."""
        if self.open:  # there is none after an error in a hook before
            for gathering in self.open.pop().arriving.values():
                gathering.wait()

    def send(self, path: str, x: T) -> None:
        """What a projection made."""
        block = self.open[-1]
        if path in block.sources:
            raise RuntimeError(f"{self.style}: {path}, of projections={self.projections}, ran twice before the core")
        block.sources[path] = x, _version(x)
        block.arriving[path] = Gathering(self.plan, [x])

    def check(self, parts: Mapping[str | int, T]) -> bool:
        """Whether keys are on their way.

        Raises:
            RuntimeError: what the core is given as keys is something else than what was sent.
        """
        if not self.open:
            return False
        block = self.open[-1]
        if block.done:
            raise RuntimeError(f"{self.style}: the core runs twice in one forward; use {self.style[len('Async') :]}")
        for key, path in self.projections.items():
            if path not in block.sources:
                raise RuntimeError(
                    f"{self.style}: the core runs before {path}, the projection of {key!r}: leave it out"
                )
            sent = block.sources[path]
            if not _same(parts[key], *sent, self.plan.seq_dim):
                raise RuntimeError(
                    f"{self.style}: the key {key!r}, of shape {tuple(parts[key].shape)}, is not the output of {path},"
                    f" of shape {tuple(sent[0].shape)}, nor a view of it that splits or joins the dims after the"
                    " sequence: something (rotary positions, a norm) comes between. Name the last module before the"
                    " core, or leave it out: the key is then sent when the core runs"
                )
        block.done = True
        return True

    def take(self, key: str | int, part: T) -> T:
        """The whole of a key that was sent."""
        block, path = self.open[-1], self.projections[key]
        if path in block.arriving:
            (block.arrived[path],) = block.arriving.pop(path).finish()
        whole = block.arrived[path]
        shape = self.plan.shape(part.shape)
        return whole if list(whole.shape) == shape else whole.view(shape)


def _version(x: T) -> int:
    return 0 if x.is_inference() else x._version


def _same(key: T, sent: T, version: int, seq_dim: int) -> bool:
    if key.data_ptr() != sent.data_ptr() or key.dtype != sent.dtype or _version(key) != version:
        return False
    if key.requires_grad != sent.requires_grad:  # detached
        return False
    if key.shape == sent.shape:
        return key.stride() == sent.stride()
    kept = seq_dim + 1
    return key.shape[:kept] == sent.shape[:kept] and key.is_contiguous() and sent.is_contiguous()


def register(module: nn.Module, projections: Mapping[str, nn.Module], blocks: Blocks, check: Any) -> None:
    """The hooks on the module that holds the projections, and on these.

    Args:
        module: the module.
        projections: those whose outputs are keys, by name.
        blocks: where the keys go.
        check: ``(name, output)``: refuses an output that can't be sent.
    """

    def enter(module: nn.Module, args: Any) -> None:
        refuse_compiled(blocks.style)
        blocks.open.append(_Block())

    module.register_forward_pre_hook(hook(enter))
    module.register_forward_hook(hook(lambda mod, args, output: blocks.close()), always_call=True)

    def sender(path: str) -> Any:
        def send(module: nn.Module, args: Any, output: Any) -> None:
            if blocks.open and not blocks.open[-1].done:
                check(path, output)
                blocks.send(path, output.to_local() if isinstance(output, DTensor) else output)

        return send

    for path, projection in projections.items():
        projection.register_forward_hook(hook(sender(path)))
