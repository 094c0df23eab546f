"""torch's own operator database on DTensors: each operator's samples, on placements of every argument.

`OpInfo`s of `torch.testing._internal.common_methods_invocations.op_db` give the operators and their samples. A result
that differs from one device's is *wrong*; an error, on all ranks alike, is *raises*; everything else is *right*.
"""

from __future__ import annotations

import functools
import itertools
import random
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hp_testing import device_type

NAMESPACES = ("linalg.", "fft.", "special.", "sparse.", "jiterator")
"""Left out: operators of their own, and those that only CUDA has."""

UNDEFINED = {
    "empty_like": "the values are uninitialised memory",
    "new_empty": "the values are uninitialised memory",
    "new_empty_strided": "the values are uninitialised memory",
    "svd_lowrank": "the signs of its random basis are arbitrary",
    "pca_lowrank": "the signs of its random basis are arbitrary",
}
"""Left out: operators whose result is not defined by their arguments and the seed."""

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
SEED = 7


@dataclass
class Verdict:
    """What one operator did.

    Attributes:
        name: the operator's, with its variant.
        right: combinations of sample and placements whose results are one device's.
        raised: those that raised, by the error's first line.
        wrong: those that differ, or changed their arguments: what differs, and where.
    """

    name: str
    right: int = 0
    raised: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """ "wrong" where anything is, else "raises" where anything does (or nothing ran), else "right"."""
        return "wrong" if self.wrong else "right" if self.right and not self.raised else "raises"


@functools.cache
def operators() -> dict[str, Any]:
    """The operators that take tensors and define their results, by name."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        module.extract_test_fn = lambda: None  # it looks for a TestCase in the stack, which takes longer than the rest
    found = {}
    for op in op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        if op.name.startswith(NAMESPACES) or op.name in UNDEFINED or dtype_of(op) is None:
            continue
        if any(isinstance(leaf, torch.Tensor) for leaf in _leaves(next(samples_of(op)))):
            found[name] = op
    return found


def dtype_of(op: Any) -> torch.dtype | None:
    """float32 where the operator has it, else an integer, bool or complex one."""
    return next((dtype for dtype in DTYPES if op.supports_dtype(dtype, "cpu")), None)


def samples_of(op: Any, gradients: bool = False) -> Iterator[Any]:
    """The operator's samples, the same in every process."""
    _seed()
    return iter(op.sample_inputs("cpu", dtype_of(op), requires_grad=gradients))


def _leaves(sample: Any) -> list[Any]:
    return tree_flatten((sample.input, sample.args, sample.kwargs))[0]


def combinations_of(tensors: list[torch.Tensor], axes: int, limit: int, name: str) -> list[tuple[Any, ...]]:
    """Combinations of placements: for each tensor and axis the dim that is sharded, or None; all replicated first."""
    choices = [list(itertools.product([None, *range(tensor.dim())], repeat=axes)) for tensor in tensors]
    count = 1
    for each in choices:
        count *= len(each)
    if count <= limit:
        return list(itertools.product(*choices))
    rng = random.Random(zlib.crc32(name.encode()))
    rows = [rng.sample(each[1:], len(each) - 1) or each for each in choices]
    found: dict[tuple[Any, ...], None] = {tuple(each[0] for each in choices): None}
    for i in range(max(map(len, rows))):  # every placement of every tensor once, as far as the limit goes
        found[tuple(row[i % len(row)] for row in rows)] = None
    while len(found) < limit:
        found[tuple(rng.choice(each) for each in choices)] = None
    return list(found)[:limit]


def judge(name: str, mesh_shape: tuple[int, ...], samples: int, limit: int, gradients: bool, peer: bool) -> Verdict:
    """Run an operator on this rank.

    Args:
        name: its name in `operators`.
        mesh_shape: the mesh of all ranks.
        samples: how many samples to take; 0: all.
        limit: how many combinations of placements for each.
        gradients: compare gradients, too.
        peer: torch's own DTensor instead of ours.
    """
    op, verdict = operators()[name], Verdict(name)
    mesh, distribute, whole = _library(mesh_shape, peer)
    given = samples_of(op, gradients and op.supports_autograd and dtype_of(op) is torch.float32)
    for index, sample in enumerate(itertools.islice(given, samples or None)):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not places:
            continue
        try:
            expected = _run(op.op, leaves, spec)
        except Exception:
            continue  # a sample that one device refuses
        for combination in combinations_of([leaves[i] for i in places], len(mesh_shape), limit, f"{name}{index}"):
            what = f"sample {index}, {[tuple(leaves[i].shape) for i in places]} on {_shown(combination)}"
            inputs = list(leaves)
            try:
                for i, placed in zip(places, combination, strict=True):
                    inputs[i] = distribute(leaves[i].detach(), placed).requires_grad_(leaves[i].requires_grad)
                made = _run(op.op, inputs, spec, whole)
            except Exception as error:
                line = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                verdict.raised[line] = verdict.raised.get(line, 0) + 1
                continue
            problem = _difference(made, expected)
            if problem is None:
                verdict.right += 1
            else:
                verdict.wrong.append(f"{what}: {problem}")
    return verdict


def judge_all(names: list[str], *options: Any) -> list[Verdict]:
    """`judge` for several operators: what a pool's rank runs."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [judge(name, *options) for name in names]


def _shown(combination: tuple[Any, ...]) -> str:
    return ", ".join("".join("R" if dim is None else f"S{dim}" for dim in placed) for placed in combination)


@functools.cache
def _library(mesh_shape: tuple[int, ...], peer: bool) -> tuple[Any, Any, Any]:
    """A mesh, a function that distributes a tensor, and one that gathers it."""
    if peer:
        import torch.distributed.tensor as library
        from torch.distributed.device_mesh import init_device_mesh
    else:
        import hp_dtensor as library
        from hp_dtensor import init_device_mesh
    mesh = init_device_mesh(device_type(), mesh_shape)

    def distribute(tensor: torch.Tensor, placed: tuple[int | None, ...]) -> Any:
        placements = [library.Replicate() if dim is None else library.Shard(dim) for dim in placed]
        return library.distribute_tensor(tensor.to(device_type()), mesh, placements, src_data_rank=None)

    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, library.DTensor) else value

    return mesh, distribute, whole


def _run(func: Any, leaves: list[Any], spec: Any, whole: Any = None) -> list[Any]:
    """The results, the arguments after the call, and the arguments' gradients, as whole tensors."""
    leaves = [
        leaf.clone().detach().requires_grad_(leaf.requires_grad) if type(leaf) is torch.Tensor else leaf
        for leaf in leaves
    ]
    input, args, kwargs = tree_unflatten(leaves, spec)
    distributed, whole = whole is not None, whole or (lambda value: value)
    _seed()
    out = func(input, *args, **kwargs)
    flat = tree_flatten(tuple(out) if isinstance(out, (tuple, list)) else out)[0]
    results = [whole(value) for value in flat]
    plain = [
        value
        for value, result in zip(flat, results, strict=True)
        if isinstance(value, torch.Tensor) and result is value
    ]
    gradients = []
    roots = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
    if roots:
        generator = torch.Generator().manual_seed(SEED)
        starts = [torch.randn(r.shape, generator=generator, dtype=r.dtype).to(r.device) for r in roots]
        torch.autograd.backward(roots, starts)
        gradients = [whole(leaf.grad) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    after = [whole(leaf.detach()) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    kept = [f"{len(plain)} plain tensors"] if plain and distributed else []
    return [
        _plain(value) for value in (*kept, *results, "the arguments after the call:", *after, "gradients:", *gradients)
    ]


def _seed() -> None:
    if device_type() == "cpu":
        torch.default_generator.manual_seed(SEED)  # `torch.manual_seed` notes the stack for each absent accelerator
    else:
        torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _difference(made: list[Any], expected: list[Any]) -> str | None:
    """What differs, None where nothing does."""
    if len(made) != len(expected):
        return f"{len(made)} values for {len(expected)}"
    stage = "result"
    for place, (got, want) in enumerate(zip(made, expected, strict=True)):
        if not isinstance(want, torch.Tensor):
            if isinstance(want, str) and want.endswith(":"):
                stage = want
            elif want is None and stage == "gradients:" and isinstance(got, torch.Tensor) and not got.any():
                continue  # no gradient is a gradient of zeros
            elif got is not want and got != want:
                return f"{stage} {got!r} for {want!r}"
        elif type(got) is not torch.Tensor or got.shape != want.shape or got.dtype is not want.dtype:
            seen = f"{tuple(got.shape)} {got.dtype}" if isinstance(got, torch.Tensor) else repr(got)
            return f"{stage} {place}: {seen} for {tuple(want.shape)} {want.dtype}"
        elif not _close(got, want):
            return f"{stage} {place}: other values"
    return None


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    if want.is_floating_point() or want.is_complex():
        size = want.abs().nan_to_num(0, 0).max().item() if want.numel() else 0.0  # sums in another order cancel less
        return torch.allclose(got, want, rtol=1e-4, atol=1e-5 * max(1.0, size / 10), equal_nan=True)
    return torch.equal(got, want)


def judge_in_pool(names: list[str], ranks: int, *options: Any, timeout: float = 600.0) -> list[Verdict]:
    """`judge_all` on ranks; where a rank dies or hangs, operator by operator, to find the one.

    An operator is right where it is on every rank.
    """
    from hp_testing import run_ranks
    from hp_testing.pools.pool import RankError

    try:
        by_rank = run_ranks(ranks, judge_all, names, *options, timeout=timeout)
    except RankError as error:
        if len(names) == 1:
            return [Verdict(names[0], wrong=[f"aborts or hangs: {str(error).splitlines()[0]}"])]
        half = len(names) // 2
        parts = (names[:half], names[half:])
        return [v for part in parts for v in judge_in_pool(part, ranks, *options, timeout=max(60.0, timeout / 2))]
    return [functools.reduce(_worse, verdicts) for verdicts in zip(*by_rank, strict=True)]


def _worse(a: Verdict, b: Verdict) -> Verdict:
    if not a.wrong and not b.wrong and sum(a.raised.values()) != sum(b.raised.values()):
        return Verdict(a.name, wrong=[f"raises on one rank alone: {a.raised or b.raised}"])
    return max(a, b, key=lambda v: ("right", "raises", "wrong").index(v.outcome))
