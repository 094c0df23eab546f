"""MatrixRule: the matrices that a parameter is made of, checked against its shape, and how each is orthogonalized."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Any

_TOKEN = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*)|(\S)")


@dataclass(frozen=True)
class Matrix:
    """A matrix inside a parameter: a box of it, whose elements in row-major order fill the matrix.

    Attributes:
        offsets: where the box starts in the parameter.
        sizes: how far it goes.
        rows: of the matrix.
        columns: of the matrix.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: int
    columns: int


@dataclass(frozen=True)
class MatrixRule:
    """The matrices of the parameters whose names match a pattern.

    ``matrices`` names the indices of the parameter's dims, as an einsum does. The last two names are the rows and the
    columns, the names before them count matrices:

    - ``"o i"``: the parameter is one matrix.
    - ``"e o i"``: a stack of them, such as experts.
    - ``"(h o) i"`` with ``sizes={"o": 128}``: the first dim holds a matrix of 128 rows for each head.
    - ``"(q | k | v) i"``: the first dim holds three matrices of equal size; unequal ones with ``sizes``.
    - ``"(h o | k o | v o) i"`` with ``sizes={"h": 32, "k": 8, "v": 8}``: the same, and a matrix for each head.
    - ``"o (i kh kw)"`` for a parameter with four dims, such as the weight of a convolution: its last dims are merged.

    Example:
        >>> MatrixRule("*.qkv.weight", "(q | k | v) i").split((6, 4))[1]
        Matrix(offsets=(2, 0), sizes=(2, 4), rows=2, columns=4)

    Args:
        pattern: a name or an fnmatch pattern of names; ``*`` also matches dots.
        matrices: the indices of the dims.
        sizes: how many values an index has, where the shape does not tell.
    """

    pattern: str
    matrices: str = "o i"
    sizes: Mapping[str, int] | tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        sizes = tuple(self.sizes.items() if isinstance(self.sizes, Mapping) else self.sizes)
        object.__setattr__(self, "sizes", sizes)
        for name, size in sizes:
            if type(size) is not int or size < 1:
                raise ValueError(f"{self!r}: size {size!r} of index {name!r} must be a positive whole number")
        named = {name for dim in _parse(self) for part in dim for name in part}
        unknown = [name for name, _ in sizes if name not in named]
        if unknown:
            raise ValueError(f"{self!r}: sizes has {unknown[0]!r}, which is no index of {self.matrices!r}")

    def split(self, shape: Sequence[int]) -> tuple[Matrix, ...]:
        """Return the matrices of a parameter of this shape, in the order of their first elements.

        Raises:
            ValueError: the rule does not fit the shape.
        """
        return _split(self, tuple(shape))


def split(shape: Sequence[int], rule: MatrixRule | None, name: str) -> tuple[Matrix, ...]:
    """Return the matrices of a parameter; without a rule all dims but the last two count matrices.

    Args:
        shape: the global shape.
        rule: the rule that matches the parameter's name, if any does.
        name: of the parameter, for errors.

    Raises:
        ValueError: the parameter has fewer than two dims and no rule, or the rule does not fit its shape.
    """
    shape = tuple(shape)
    if rule is None:
        if len(shape) < 2:
            raise ValueError(
                f"Muon: parameter {name!r} of shape {shape} has {len(shape)} dims, and only matrices can be"
                " orthogonalized. Leave it to another optimizer (biases and norms: adamw_params of get_hyper_optimizer)"
            )
        if not prod(shape):
            return ()
        rule = MatrixRule("*", " ".join([*(f"b{dim}" for dim in range(len(shape) - 2)), "o i"]))
    try:
        return rule.split(shape)
    except ValueError as error:
        raise ValueError(f"Muon: parameter {name!r} of shape {shape}: {error}") from None


def rule_of(name: str, rules: Iterable[MatrixRule]) -> MatrixRule | None:
    """Return the one rule that matches a name, None where none does.

    Raises:
        ValueError: two rules match it.
    """
    matching = [rule for rule in rules if rule.pattern == name or fnmatchcase(name, rule.pattern)]
    if len(matching) > 1:
        raise ValueError(
            f"MatrixRule: parameter {name!r} is matched by {matching[0].pattern!r} and {matching[1].pattern!r}; make"
            " the patterns exclude each other"
        )
    return matching[0] if matching else None


Dim = tuple[tuple[str, ...], ...]
"""The alternatives of a dim, which lie in it one after the other, each a product of indices."""


def _parse(rule: MatrixRule) -> list[Dim]:
    """Read the text: one entry for each dim, or for each of rows and columns where dims are merged."""
    dims: list[Dim] = []
    for inside, name, stray in _TOKEN.findall(rule.matrices):
        parts = tuple(tuple(part.split()) for part in inside.split("|")) if not name else ((name,),)
        bad = [word for part in parts for word in part if not word.isidentifier()]
        if stray or bad or not all(parts):
            raise ValueError(
                f"{rule!r}: {rule.matrices!r} cannot be read at {stray or (bad[0] if bad else '()')!r}. Write an index"
                ' for each dim, such as "o i", "(h o) i" or "(q | k | v) i"'
            )
        dims.append(parts)
    for dim in dims:
        for part in dim:
            if len(set(part)) < len(part):
                raise ValueError(f"{rule!r}: an index appears twice in ({' '.join(part)})")
    if not dims:
        raise ValueError(f"{rule!r}: {rule.matrices!r} names no indices")
    return dims


@lru_cache(maxsize=4096)
def _split(rule: MatrixRule, shape: tuple[int, ...]) -> tuple[Matrix, ...]:
    dims = _parse(rule)
    if len(dims) != len(shape):
        return _split_merged(rule, dims, shape)
    sizes = dict(rule.sizes)
    cut = [_alternatives(rule, dim, size, sizes, at) for at, (dim, size) in enumerate(zip(dims, shape))]
    matrices: list[Matrix] = []
    for chosen in itertools.product(*cut):
        matrices += _matrices(rule, chosen, shape)
    return tuple(sorted(matrices, key=lambda matrix: matrix.offsets))


Chosen = tuple[int, tuple[int, ...]]
"""Where an alternative starts in its dim, and the sizes of its indices."""


def _matrices(rule: MatrixRule, chosen: Sequence[Chosen], shape: tuple[int, ...]) -> list[Matrix]:
    """Return the matrices of one alternative of each dim."""
    factors = [(dim, size) for dim, (_, sizes) in enumerate(chosen) for size in sizes]
    if len(factors) < 2:
        raise ValueError(f"{rule!r} names one index, a matrix has two: rows and columns")
    rows, columns = factors[-2][1], factors[-1][1]
    counted = len(factors) - 2  # the leading indices count matrices
    batch = [factors[at] for at in range(counted)]
    matrices = []
    for index in itertools.product(*(range(size) for _, size in batch)):
        offsets, sizes = [], []
        at = 0
        for start, own in chosen:
            inner = [size for position, size in enumerate(own, at) if position >= counted]
            within = 0
            for position, size in enumerate(own, at):
                if position < counted:
                    within = within * size + index[position]
            offsets.append(start + within * prod(inner))
            sizes.append(prod(inner))
            at += len(own)
        matrices.append(Matrix(tuple(offsets), tuple(sizes), rows, columns))
    return matrices


def _split_merged(rule: MatrixRule, dims: Sequence[Dim], shape: tuple[int, ...]) -> tuple[Matrix, ...]:
    """Read a rule that has an index for each dim and merges some of them."""
    names = [name for dim in dims for part in dim for name in part]
    if len(names) != len(shape) or any(len(dim) > 1 for dim in dims) or len(dims) < 2:
        raise ValueError(
            f"{rule!r} describes {len(dims)} dims" + (f" or {len(names)}" if len(names) != len(dims) else "") + f", and"
            f" the shape {shape} has {len(shape)}"
        )
    for name, size in rule.sizes:
        if shape[names.index(name)] != size:
            raise ValueError(f"{rule!r}: index {name!r} is {size}, and dim {names.index(name)} of {shape} is not")
    groups, at = [], 0
    for dim in dims:
        groups.append(shape[at : at + len(dim[0])])
        at += len(dim[0])
    counts = [size for group in groups[:-2] for size in group]
    inner = shape[len(counts) :]
    return tuple(
        Matrix((*index, *(0 for _ in inner)), (*(1 for _ in index), *inner), prod(groups[-2]), prod(groups[-1]))
        for index in itertools.product(*map(range, counts))
    )


def _alternatives(rule: MatrixRule, dim: Dim, size: int, sizes: Mapping[str, int], at: int) -> list[Chosen]:
    """Divide a dim among its alternatives, and each among its indices."""
    open_parts = [part for part in dim if any(name not in sizes for name in part)]
    if len(open_parts) == len(dim) and len(dim) > 1 and all(len(part) == 1 for part in dim):
        if size % len(dim):
            raise ValueError(
                f"{rule!r}: {len(dim)} equal parts do not divide dim {at} of size {size}; name their sizes, such as"
                f" sizes={{{dim[0][0]!r}: ...}}"
            )
        return [(size // len(dim) * number, (size // len(dim),)) for number in range(len(dim))]
    unknown = sorted({name for part in open_parts for name in part if name not in sizes})
    if len(unknown) > 1:
        raise ValueError(
            f"{rule!r}: dim {at} of size {size} leaves {len(unknown)} indices open ({', '.join(unknown)}); name all but"
            " one in sizes"
        )
    # The sizes are a * x + b with one unknown x at most.
    known = sum(prod(sizes[name] for name in part) for part in dim if part not in open_parts)
    factor = sum(prod(sizes.get(name, 1) for name in part) for part in open_parts)
    if unknown and (size <= known or (size - known) % factor):
        raise ValueError(
            f"{rule!r}: dim {at} of size {size}"
            + (f" less {known}" if known else "")
            + f" is not a multiple of {factor}, so index {unknown[0]!r} has no whole size"
        )
    if not unknown and known != size:
        raise ValueError(f"{rule!r}: the sizes of dim {at} add up to {known}, and it has {size}")
    value = {**sizes, **({unknown[0]: (size - known) // factor} if unknown else {})}
    chosen: list[Chosen] = []
    start = 0
    for part in dim:
        own = tuple(value[name] for name in part)
        chosen.append((start, own))
        start += prod(own)
    return chosen


# ---- rules of attention heads ----
HEAD_WISE_PATTERNS = tuple(
    f"{prefix}{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "wq", "wk", "wv") for prefix in ("*.", "")
)
"""Names of projections to queries, keys and values, whose rows are those of heads, one head after the other."""


def all_rules(
    rules: Sequence[MatrixRule], head_wise: bool, head_dim: int | None, patterns: Sequence[str] | None
) -> tuple[MatrixRule, ...]:
    """Return a user's rules and those that ``head_wise`` stands for.

    Args:
        rules: the user's.
        head_wise: whether heads are matrices of their own.
        head_dim: rows of a head.
        patterns: of names. Default: `HEAD_WISE_PATTERNS`.

    Raises:
        TypeError: rules that are no list of rules.
        ValueError: ``head_wise`` without ``head_dim``, or one of the others without ``head_wise``.
    """
    if not isinstance(rules, Sequence) or not all(isinstance(rule, MatrixRule) for rule in rules):
        raise TypeError(f"Muon: rules must be a list of MatrixRule, such as rules=[MatrixRule(...)], got {rules!r}")
    if not head_wise:
        if head_dim is not None or patterns is not None:
            raise ValueError("Muon: head_dim and head_wise_patterns need head_wise=True")
        return tuple(rules)
    if type(head_dim) is not int or head_dim < 1:
        raise ValueError(f"Muon: head_wise=True needs head_dim, the rows of a head, got {head_dim!r}")
    chosen = HEAD_WISE_PATTERNS if patterns is None else tuple(patterns)
    return (*rules, *(MatrixRule(pattern, "(h o) i", {"o": head_dim}) for pattern in chosen))


NS_DTYPES = ("float64", "float32", "bfloat16")
"""Dtypes of the products."""

Triple = tuple[float, float, float]

_SAFETY = 1.01
"""Polar Express assumes singular values of at most one, which rounding exceeds."""

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

NS_VARIANTS: dict[str, tuple[Triple, ...]] = {
    "asym5": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "legacy": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
}
"""Coefficients of the steps; the last ones repeat where there are more steps.

"asym5" is tuned for five steps, "legacy" is Keller Jordan's quintic, "polar_express" is from Amsel et al. (2025),
https://arxiv.org/abs/2505.16932, for singular values of at least 0.001 of the norm.
"""


@dataclass(frozen=True)
class Orthogonalization:
    """What is done to a matrix; matrices of equal shape with equal settings are computed together.

    Attributes:
        coefficients: a, b and c of each step: X becomes a X + (b A + c A A) X, where A = X X^T.
        epsilon: added to the norm by which the matrix is divided before.
        rms: the result is multiplied by this and by sqrt(max(rows, columns)).
        dtype: of the products, one of `NS_DTYPES`; None leaves it to the parameter's dtype and the kind of device.
    """

    coefficients: tuple[Triple, ...]
    epsilon: float
    rms: float
    dtype: str | None = None

    @staticmethod
    def of(
        variant: str,
        coefficients: Sequence[float] | Sequence[Sequence[float]] | None,
        steps: int,
        epsilon: float,
        rms: float,
        dtype: str | None = None,
    ) -> Orthogonalization:
        """Check Muon's options.

        Args:
            variant: a name in `NS_VARIANTS`.
            coefficients: a triple, or one for each step, in place of the variant's.
            steps: number of iterations.
            epsilon: see above.
            rms: see above.
            dtype: see above.

        Raises:
            ValueError: an unknown variant or dtype, a number out of its range, or something else than triples.
        """
        if variant not in NS_VARIANTS:
            near = difflib.get_close_matches(str(variant), NS_VARIANTS, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Muon: ns_variant must be one of {', '.join(NS_VARIANTS)}, got {variant!r}{hint}")
        if dtype is not None and dtype not in NS_DTYPES:
            raise ValueError(f"Muon: ns_dtype must be None or one of {', '.join(NS_DTYPES)}, got {dtype!r}")
        if type(steps) is not int or not 1 <= steps < 100:
            raise ValueError(f"Muon: ns_steps must be a whole number from 1 to 99, got {steps!r}")
        if not epsilon > 0:
            raise ValueError(f"Muon: ns_epsilon must be positive, for a gradient may be zero; got {epsilon!r}")
        if not rms > 0:
            raise ValueError(f"Muon: matched_adamw_rms must be positive, got {rms!r}")
        listed = NS_VARIANTS[variant] if coefficients is None else _triples(coefficients)
        if coefficients is not None and len(listed) not in (1, steps):
            raise ValueError(f"Muon: ns_coefficients has {len(listed)} triples for {steps} steps; pass one, or {steps}")
        chosen = [*listed, *[listed[-1]] * steps][:steps]
        return Orthogonalization(tuple(chosen), float(epsilon), float(rms), dtype)

    @staticmethod
    def of_group(group: Mapping[str, Any]) -> Orthogonalization:
        """Check and return what a parameter group of Muon's sets; see `of`."""
        return Orthogonalization.of(
            group["ns_variant"],
            group["ns_coefficients"],
            group["ns_steps"],
            group["ns_epsilon"],
            group["matched_adamw_rms"],
            group.get("ns_dtype"),
        )

    def scale(self, rows: int, columns: int) -> float:
        """Return what the orthogonal matrix is multiplied by."""
        return self.rms * max(rows, columns) ** 0.5


def _triples(coefficients: Sequence[float] | Sequence[Sequence[float]]) -> tuple[Triple, ...]:
    listed = [coefficients] if coefficients and isinstance(coefficients[0], (int, float)) else list(coefficients)
    if not listed or any(len(each) != 3 for each in listed):  # type: ignore[arg-type]
        raise ValueError(f"Muon: ns_coefficients must be three numbers, or three for each step; got {coefficients!r}")
    return tuple(tuple(float(number) for number in each) for each in listed)  # type: ignore[misc,union-attr]
