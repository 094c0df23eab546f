"""Plans: what a kernel's call does with its operands' local tensors, and what its results are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor
from mindspore._c_expression import TensorPy  # type: ignore[attr-defined]

from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mindspore.backward.autograd import convert, local_mode
from hp_dtensor.mindspore.dtensor import DTensor, wrap
from hp_dtensor.mindspore.ops.views import VIEWS, before_write, note_view
from hp_dtensor.rules.planning import Binding, Call, Fix, collect, moved, place
from hp_platform import get_platform


@dataclass(slots=True)
class Plan:
    """A planned call: moves, the local function, the results' layouts."""

    fixes: list[Fix]
    outs: list[TensorSpec]
    local: Any
    in_place: bool
    view: bool
    name: str

    def run(self, run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the call on operands with the layouts for which the plan was made."""
        if self.in_place:
            before_write(args[0], self.name)
        values, named = moved(self.fixes, args, kwargs, convert)
        with local_mode():
            out = (self.local or run)(values, named)
            if self.in_place and get_platform().devices.kind == "cpu":
                # On the CPU only a copy is in place: MindSpore's add_ and its kin leave what they are called on as it
                # was, and return the new values.
                TensorPy.copy_(args[0], out)
        if self.in_place:
            return args[0]
        if isinstance(out, Tensor):
            result = wrap(out, self.outs[0])
            if self.view:
                note_view(args[0], (result,), self.name, copied=bool(self.fixes))
            return result
        flat = [value for value in out if isinstance(value, Tensor)]
        for value, spec in zip(flat, self.outs, strict=True):
            wrap(value, spec)
        if self.view:
            note_view(args[0], flat, self.name, copied=bool(self.fixes))
        return out


def make_plan(call: Call, binding: Binding) -> Plan:
    """Plans a call: operands, result shapes, placements, local function.

    Raises:
        NoLegalPlacement: an in-place call that would have to move what it writes to.
    """
    collect(call, binding, DTensor)
    assert binding.shapes is not None
    shapes = [tuple(shape) for shape in binding.shapes(call) or ()]
    fixes = place(call, binding, shapes, [tensor.itemsize for tensor in call.given])
    return Plan(
        fixes,
        call.results,
        binding.local(call) if binding.local is not None else None,
        binding.in_place,
        call.name in VIEWS,
        call.name,
    )
