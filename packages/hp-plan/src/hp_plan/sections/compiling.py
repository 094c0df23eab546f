"""`[compile]`: parts of a model that become one graph each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompileSection:
    """Blocks that torch compiles, each into one graph or not at all (`torch.compile(fullgraph=True)`).

    Attributes:
        blocks: patterns of modules, such as `"model.layers.*"`; none compiles nothing.
        backend: of torch.compile.
    """

    blocks: tuple[str, ...] = ()
    backend: str = "inductor"
