"""A Cell whose q, k and v are parts of a sequence.

MindSpore has no one attention whose calls could be intercepted. Ulysses runs the Cell as it is, on the whole sequence
and a part of the heads. Around a ring no rank has all keys, so attention is computed in the Cell's place: a Cell says
that it is attention by ``parallel_kind = "attention"``, as other Cells say what they are.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, mint, nn, ops

from hp_dtensor import DeviceMesh
from hp_dtensor.mindspore.extend import DTensor
from hp_styles.context.documents import Part
from hp_styles.context.group import ContextRanks
from hp_styles.context.header import ERRORS, Header, check_alike, error_number
from hp_styles.context.inputs import check_output, find_input, with_inputs
from hp_styles.context.plan import Settings, kv_copies, ring_blocks, split_degrees
from hp_styles.context.rounds import Rounds
from hp_styles.mindspore.context.ring import ring_attention
from hp_styles.mindspore.context.sequence import Exchange, exchange, repeated
from hp_styles.mindspore.modules import gather_numbers


def attach(module: nn.Cell, mesh: DeviceMesh, settings: Settings, rounds: Rounds) -> None:
    """Let a Cell's attention see the keys of all ranks.

    Raises:
        NotImplementedError: q, k and v are no inputs, projections are to be sent early, or a ring around a Cell that
            does not say that it is attention.
        RuntimeError: the Cell has such a style already.
        ValueError: a degree or an order of ranks that does not fit.
    """
    name = type(module).__name__
    if settings.projections or not settings.takes_qkv:
        raise NotImplementedError(
            f"ContextParallel on the Cell {name}: MindSpore's attention is not intercepted; apply the style to a Cell"
            " that is passed q, k and v, and name them (qkv_indices= or qkv_kwarg_names=)"
        )
    if getattr(module, "_context_parallel", False):
        raise RuntimeError(f"ContextParallel: {name} already has a context parallel style; apply only one")
    attention = _Attention(module, mesh, settings)
    if attention.degrees.ring > 1 and getattr(module, "parallel_kind", None) != "attention":
        raise NotImplementedError(
            f"ContextParallel on the Cell {name}: around a ring of {attention.degrees.ring} ranks attention is computed"
            " in the Cell's place. Set parallel_kind = 'attention' on a Cell that computes softmax(q k^T scale) v (with"
            " attributes is_causal and, if it is not 1 / sqrt(head size), scale), or take ulysses_degree=None"
        )
    module._context_parallel = True
    module.construct = attention.construct  # around what may be put on the Cell already


def enclose(root: nn.Cell, rounds: Rounds, mesh: DeviceMesh, load_balance: bool) -> None:
    """Do nothing: each Cell's call compares what the ranks compute."""


class _Attention:
    """The construct of a Cell over a context group."""

    def __init__(self, module: nn.Cell, mesh: DeviceMesh, settings: Settings) -> None:
        self._module, self._settings = module, settings
        self._original = vars(module).get("construct") or type(module).construct.__get__(module)
        self._ranks = ContextRanks(mesh, settings.load_balance, "ContextParallel")
        self.degrees = split_degrees(self._ranks.size, settings.ulysses_degree, settings.inner_ring_degree)
        self._ulysses = self._ranks.subgroup(self.degrees.ulysses_ranks(self._ranks.place))
        self._links = self._ranks.links(self.degrees, ops.zeros_like)
        self._causal = bool(getattr(module, "is_causal", False))

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Cell on q, k and v of the whole sequence, or attention around the ring."""
        inputs = [find_input(self._module, args, kwargs, self._settings, which) for which in range(3)]
        places, qkv = [place for place, _ in inputs], [x for _, x in inputs]
        head, seq = (dim % qkv[0].ndim for dim in (self._settings.head_dim, self._settings.seq_dim))
        self._compare(qkv, places, args, kwargs, head, seq)
        q, k, v = qkv
        copies = kv_copies(q.shape[head], k.shape[head], self.degrees.ulysses, self._ranks.size)
        k, v = (repeated(x, copies, head) for x in (k, v))
        plan = Exchange(self._ulysses, self.degrees.ulysses, head, seq, self._settings.load_balance)
        q, k, v = (exchange(plan, x, to_heads=True) for x in (q, k, v))
        if self.degrees.ring > 1:
            out = self._around(q, k, v, head, seq)
        else:
            args, kwargs = with_inputs(args, kwargs, places, (q, k, v))
            out = self._original(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise NotImplementedError(
                f"ContextParallel on the Cell {type(self._module).__name__}: the output must be a tensor, got"
                f" {type(out).__name__}; attention weights are not redistributed"
            )
        check_output(self._module, tuple(out.shape), q.shape[head], q.shape[seq], head, seq)
        return exchange(plan, out, to_heads=False)

    def _around(self, q: Tensor, k: Tensor, v: Tensor, head: int, seq: int) -> Tensor:
        links, balance = self._links, self._settings.load_balance
        sizes = {"causal": self._causal, "load_balance": balance, "inner": self.degrees.inner}
        blocks = ring_blocks(self.degrees.ring, links.rank, **sizes)
        (batch,) = set(range(4)) - {head, seq, 3}
        order = batch, head, seq, 3
        q, k, v = (mint.permute(x, order) for x in (q, k, v))
        scale = getattr(self._module, "scale", None)
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        out = ring_attention(q, k, v, links=links, blocks=blocks, scale=scale)
        return mint.permute(out, tuple(order.index(dim) for dim in range(4)))

    def _compare(
        self, qkv: list[Tensor], places: list[int | str], args: Any, kwargs: dict[str, Any], head: int, seq: int
    ) -> None:
        """Refuse what any rank refuses, and ranks whose parts differ, before anything is sent."""
        fault = None
        try:
            self._check(qkv, head, seq)
            if self.degrees.ring > 1:
                self._refuse_others(places, args, kwargs)
        except ERRORS as error:
            fault = error
        if self._ranks.size == 1:
            if fault is not None:
                raise fault
            return
        shapes = tuple(tuple(x.shape) for x in qkv)
        degrees = self.degrees.ulysses, self.degrees.inner
        balance, part = self._settings.load_balance, Part(positioned=False)
        header = Header(shapes, self._causal, None, balance, degrees, part, error_number(fault)).numbers()
        rows = gather_numbers(header, self._ranks.mesh, qkv[0])
        messages = [rows[at : at + len(header)] for at in range(0, len(rows), len(header))]
        check_alike([Header.read(each) for each in messages], self._ranks.ranks, fault)

    def _refuse_others(self, places: list[int | str], args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse what attention in the Cell's place would leave out: a mask, a dropout."""
        inputs = {**dict(enumerate(args)), **kwargs}
        others = [place for place, value in inputs.items() if place not in places and value is not None]
        drops = [name for name, cell in self._module.cells_and_names() if _drops(cell)]
        if others or drops:
            what = f"the inputs {others}" if others else f"the dropout of {', '.join(drops)}"
            raise NotImplementedError(
                f"ContextParallel on the Cell {type(self._module).__name__}: around a ring of {self.degrees.ring} ranks"
                f" attention is computed in the Cell's place, without {what}: leave that out, or take"
                " ulysses_degree=None"
            )

    def _check(self, qkv: list[Tensor], head: int, seq: int) -> None:
        q, k, v = qkv
        if any(isinstance(x, DTensor) for x in qkv):
            raise NotImplementedError(
                "ContextParallel: q, k and v are DTensors; on MindSpore pass this rank's parts as plain tensors"
                " (to_local())"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"ContextParallel: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must have the same dtype")
        if self.degrees.ring > 1 and (q.ndim != 4 or 3 in (head, seq) or k.shape[:3] != v.shape[:3]):
            shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
            raise ValueError(f"ContextParallel: around a ring q, k and v have 4 dims, the head size last; got {shapes}")
        for x, name in ((q, "q"), (k, "k")):
            self._ranks.check_halves(x, name, seq)
        kv_copies(q.shape[head], k.shape[head], self.degrees.ulysses, self._ranks.size)


def _drops(cell: nn.Cell) -> bool:
    """Tell whether a Cell is a dropout that is on."""
    kinds = (nn.Dropout, mint.nn.Dropout)
    return isinstance(cell, kinds) and cell.training and cell.p != 0 and getattr(cell, "keep_prob", 0) != 1
