"""The rule language and the choice of placements."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hp_dtensor
from hp_dtensor.layout.placements import Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.redistribution import cost
from hp_dtensor.rules import RULES, FactorMap, NoLegalPlacement, rule, solve
from hp_dtensor.rules.library import dims_argument

R, P = Replicate(), Partial()


def _solve(name: str, shapes, results, placements, ranks=2, in_place=None, sizes=None, **arguments):
    """Placements of operands, of results, and what varies, on one axis; placements may be tuples on several."""
    each = [p if isinstance(p, tuple) else (p,) for p in placements]
    mesh = ranks if isinstance(ranks, tuple) else (ranks,)
    factors = RULES[name](shapes, results, arguments)
    found = solve(factors, shapes, each, mesh, sizes or [4] * len(shapes), results, in_place)
    one = len(mesh) == 1
    return tuple([x[0] if one else x for x in group] for group in (found.operands, found.results, found.vary))


# ---- the language ----
def test_an_equation_names_factors() -> None:
    made = rule("... m k, ... k n -> ... m n", reduce="k")([(2, 5, 7), (7, 3)], [(2, 5, 3)], {})
    assert made.operands == ((0, 1, 2), (2, 3)) and made.results == ((0, 1, 3),)
    assert made.reduce == {2: "sum"}


def test_a_dim_of_size_one_is_broadcast() -> None:
    made = rule("... d, ... d -> ... d")([(5, 7), (1, 7)], [(5, 7)], {})
    assert made.operands == ((0, 1), (None, 1)) and made.results == ((0, 1),)


def test_the_first_alternative_whose_ranks_fit_is_taken() -> None:
    product = rule("m k, k n -> m n | m k, k -> m | replicate", reduce="k", linear="0 1")
    assert product([(5, 7), (7, 3)], [(5, 3)], {}).results == ((0, 2),)
    assert product([(5, 7), (7,)], [(5,)], {}).results == ((0,),)
    made = product([(2, 5, 7), (7, 3)], [(2, 5, 3)], {})
    assert made.operands == ((None,) * 3, (None,) * 2) and made.results == ((None,) * 3,)
    assert not made.reduce and not made.linear, "what is gathered is linear in nothing"


def test_dim_is_an_argument() -> None:
    made = rule("* -> * - dim", reduce="dim:max", nonempty="dim", dim=-1)
    assert made([(4, 5, 6)], [(4, 6)], {"dim": 1}).results == ((0, 2),)
    assert made([(4, 5, 6)], [(4, 1, 6)] * 2, {"dim": 1, "keepdim": True}).results == ((0, None, 2),) * 2
    assert made([(4, 5, 6)], [()], {"dim": None}).reduce == {0: "max", 1: "max", 2: "max"}
    assert made([(4, 5, 6)], [(4, 5)], {}).nonempty == {2}
    assert rule("* -> *", need_replication="dim", nonempty="*")([(4, 5)], [(4, 5)], {"dim": 0}).nonempty == {0, 1}


def test_what_an_operation_is_linear_in() -> None:
    one, two = [(4, 6)], [(4, 6), (6,)]

    def linear(shapes, arguments=None, **options) -> list[set[int]]:
        return [set(each) for each in rule("...+ -> ...+", **options)(shapes, one, arguments or {}).linear]

    assert linear(two, linear="each") == [{0}, {1}] and linear(two, linear="all") == [{0, 1}]
    assert linear(one, linear="all") == [{0}] and linear(one, linear="several") == []
    assert linear(two, linear="several") == [{0, 1}] == linear(two, linear="0+1")
    assert linear(one, {"cast": False}, linear="0", unless="cast") == [{0}]
    assert linear(one, {"cast": True}, linear="0", unless="cast") == []
    added = rule("m, m -> m | m, m, m -> m", linear="0 1", bias="2")
    assert added([(4,)] * 2, [(4,)], {}).linear and not added([(4,)] * 3, [(4,)], {}).linear


@pytest.mark.parametrize(
    ("equation", "options", "message"),
    [
        ("a b", {}, "rule 'a b' has no '->'"),
        ("a b -> a | a", {}, "rule 'a b -> a | a' has no '->'"),
        ("a b -> a", {"reduce": "c"}, "rule 'a b -> a' has no factor 'c'"),
        ("a b -> a", {"need_replication": "ab"}, "rule 'a b -> a' has no factor 'ab'"),
        ("a b -> a", {"need_replication": "dim"}, "rule 'a b -> a' has no factor 'dim'"),
    ],
)
def test_errors_of_the_language(equation: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rule(equation, **options)


@pytest.mark.parametrize(
    ("equation", "operands", "results", "message"),
    [
        ("m k, k -> m", [(5,), (5,)], [(5,)], "operands of shapes [(5,), (5,)] do not fit 'm k, k -> m'"),
        ("m k, k -> m", [(5, 3), (3,)], [()], "results of shapes [()] do not fit 'm k, k -> m'"),
        ("... -> ...", [(5,), (5,)], [(5,)], "operands of shapes [(5,), (5,)] do not fit '... -> ...'"),
    ],
)
def test_shapes_that_do_not_fit_the_equation(equation: str, operands: list, results: list, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rule(equation)(operands, results, {})


def test_dims() -> None:
    assert dims_argument(None, 3) == (0, 1, 2) == dims_argument((), 3)
    assert dims_argument(-1, 3) == (2,) and dims_argument([0, -1], 3) == (0, 2) and dims_argument(0, 0) == ()
    with pytest.raises(IndexError, match="dim 3 is out of range for a tensor with 3 dims"):
        dims_argument(3, 3)


# ---- the choice ----
def test_colwise_and_rowwise_matmul() -> None:
    shapes, out = [(4, 8), (8, 6)], [(4, 6)]
    assert _solve("matmul", shapes, out, [R, Shard(1)])[:2] == ([R, Shard(1)], [Shard(1)])
    assert _solve("matmul", shapes, out, [Shard(1), Shard(0)])[:2] == ([Shard(1), Shard(0)], [P])
    assert _solve("matmul", shapes, out, [Shard(0), R])[:2] == ([Shard(0), R], [Shard(0)])


def test_a_replicated_operand_varies_where_the_result_does() -> None:
    assert _solve("matmul", [(4, 8), (8, 6)], [(4, 6)], [R, Shard(1)])[2] == [True, False]
    assert _solve("matmul", [(4, 8), (8, 6)], [(4, 6)], [R, R])[2] == [False, False]
    # sharded with the other operand, a value does not vary: each part is used once
    assert _solve("matmul", [(4, 8), (8, 6)], [(4, 6)], [R, Shard(0)])[::2] == ([Shard(1), Shard(0)], [False, False])


def test_the_cheapest_move_wins() -> None:
    # gather the small weight, not the large activation
    assert _solve("matmul", [(1000, 8), (8, 6)], [(1000, 6)], [Shard(0), Shard(0)])[0] == [Shard(0), R]
    assert _solve("matmul", [(4, 8), (8, 600)], [(4, 600)], [Shard(0), Shard(1)])[0] == [R, Shard(1)]
    # bytes, not elements
    both = [(100, 8), (8, 101)], [(100, 101)], [Shard(0), Shard(1)]
    assert _solve("matmul", *both, sizes=[8, 2])[0] == [Shard(0), R]


def test_partial_passes_where_the_operation_is_linear() -> None:
    shapes, out = [(4, 6), (4, 6)], [(4, 6)]
    assert _solve("add", shapes, out, [P, P])[:2] == ([P, P], [P])
    assert _solve("add", shapes, out, [P, R])[:2] == ([R, R], [R]), "a + b is linear in both together only"
    assert _solve("add", [(4, 6), (6,)], out, [P, R]) == ([P, P], [P], [False, False]), "a bias becomes parts itself"
    assert _solve("add", shapes, out, [P, R], in_place=0)[:2] == ([P, P], [P])
    assert _solve("copy", shapes, out, [Partial("max")] * 2)[1] == [Partial("max")]
    assert _solve("maximum", shapes, out, [Partial("max")] * 2)[1] == [Partial("max")]
    assert _solve("maximum", shapes, out, [P, P])[1] == [R]
    assert _solve("mul", shapes, out, [P, R]) == ([P, R], [P], [False, True])
    assert _solve("mul", shapes, out, [P, P])[1] in ([P], [R]) and _solve("mul", shapes, out, [P, P])[0].count(P) < 2
    assert _solve("add", shapes, out, [Partial("max"), Partial("max")])[0] == [R, R], "max is not linear"
    assert _solve("pointwise", shapes[:1], out, [P])[:2] == ([R], [R])
    assert _solve("div", shapes, out, [R, P])[0] == [R, R], "1 / x is not linear in x"


def test_reductions() -> None:
    assert _solve("sum", [(4, 6)], [(6,)], [Shard(0)], dim=0)[1] == [P]
    assert _solve("sum", [(4, 6)], [(6,)], [Shard(1)], dim=0)[1] == [Shard(0)]
    assert _solve("sum", [(4, 6)], [(1, 6)], [Shard(1)], dim=0, keepdim=True)[1] == [Shard(1)]
    assert _solve("max", [(4, 6)], [(6,)], [Shard(0)], dim=0)[1] == [Partial("max")]
    assert _solve("max", [(4, 6)], [(6,)], [Shard(0)], ranks=3, dim=0)[0] == [R], "no maximum of an empty part"
    assert _solve("whole_reduction", [(4, 6)], [(6,)], [Shard(0)], dim=0)[0] == [R]


def test_uneven_and_strided_shards() -> None:
    assert _solve("add", [(5, 3), (5, 3)], [(5, 3)], [Shard(0), Shard(0)])[:2] == ([Shard(0)] * 2, [Shard(0)])
    strided = StridedShard(0, 2)
    assert _solve("add", [(8, 3), (8, 3)], [(8, 3)], [strided, strided])[1] == [strided]
    assert _solve("add", [(8, 3), (8, 3)], [(8, 3)], [strided, Shard(0)])[0] in ([strided] * 2, [Shard(0)] * 2)


def test_heads_are_cut_in_equal_parts() -> None:
    q, kv = (2, 6, 5, 4), (2, 3, 5, 4)
    out = [q]
    assert _solve("attention", [q, kv, kv], out, [Shard(1)] * 3, ranks=3)[1] == [Shard(1)]
    assert _solve("attention", [q, kv, kv], out, [Shard(1)] * 3, ranks=2)[0] == [R, R, R], "3 heads on 2 ranks"


def test_embedding_over_the_vocabulary_is_partial() -> None:
    assert _solve("embedding", [(4, 6), (9, 5)], [(4, 6, 5)], [R, Shard(0)])[1] == [P]
    assert _solve("embedding", [(4, 6), (9, 5)], [(4, 6, 5)], [R, Shard(1)])[1] == [Shard(2)]


def test_ragged_operands_of_one_layout_go_element_by_element() -> None:
    ragged = RaggedShard((0, 1), (10, 5))
    assert _solve("mul", [(5, 3), (5, 3)], [(5, 3)], [ragged, ragged])[:2] == ([ragged] * 2, [ragged])
    assert _solve("mul", [(5, 3), ()], [(5, 3)], [ragged, R]) == ([ragged, R], [ragged], [False, True])
    assert _solve("matmul", [(5, 3), (3, 2)], [(5, 2)], [ragged, R])[0] == [R, R]


def test_operands_on_two_axes() -> None:
    operands, results, vary = _solve("matmul", [(4, 8), (8, 6)], [(4, 6)], [(Shard(0), R), (R, Shard(1))], ranks=(2, 2))
    assert operands == [(Shard(0), R), (R, Shard(1))] and results == [(Shard(0), Shard(1))]
    assert vary == [(False, True), (True, False)]


def test_a_dim_cut_by_two_axes() -> None:
    twice = (Shard(0), Shard(0))
    assert _solve("add", [(8, 3), (8, 3)], [(8, 3)], [twice, twice], ranks=(2, 2))[1] == [twice]


def test_an_operand_costs_what_is_local_of_it() -> None:
    # The left operand is larger, but 8 ranks of the other axis have a part of it each.
    shapes, placements = [(8, 8, 64)] * 2, [(Shard(0), Shard(2)), (Shard(1), R)]
    operands = _solve("add", shapes, shapes[:1], placements, ranks=(2, 8), sizes=[8, 4])[0]
    assert operands[1] == (Shard(0), Shard(2)), "moved after it is sliced: nothing is cheaper"
    operands = _solve("matmul", [(512, 256), (256, 512)], [(512, 512)], [(Shard(0), Shard(1))] * 2, ranks=(2, 4))[0]
    assert operands == [(Shard(0), Shard(1)), (R, Shard(0))]


CUTS = [R, Shard(0), Shard(1), Shard(2)]


@settings(deadline=None)
@given(st.data())
def test_no_legal_choice_costs_less(data) -> None:
    mesh = data.draw(st.tuples(*[st.sampled_from([2, 4, 8])] * 2))
    name, dims = data.draw(st.sampled_from([("matmul", 2), ("add", 3), ("mul", 2)]))
    m, k, n = data.draw(st.tuples(*[st.sampled_from([5, 8, 64])] * 3))
    shapes = [(m, k), (k, n)] if name == "matmul" else [(m, k, n)[:dims]] * 2
    out = [(m, n)] if name == "matmul" else shapes[:1]
    placed = st.tuples(*[st.sampled_from(CUTS[: 1 + dims])] * 2)
    placements, sizes = data.draw(st.tuples(placed, placed)), data.draw(st.tuples(*[st.sampled_from([2, 8])] * 2))

    def price(targets) -> int:
        moves = zip(placements, targets, shapes, sizes, strict=True)
        return sum(cost(src, dst, shape, mesh, size) for src, dst, shape, size in moves)

    def considered(axis: int, targets) -> bool:
        """True if on this axis all are replicated, or one that is not stays."""
        pairs = [(src[axis], dst[axis]) for src, dst in zip(placements, targets, strict=True)]
        return all(dst == R for _, dst in pairs) or any(src == dst != R for src, dst in pairs)

    operands = _solve(name, shapes, out, placements, ranks=mesh, sizes=sizes)[0]
    for targets in itertools.product(itertools.product(CUTS[: 1 + dims], repeat=2), repeat=2):
        if considered(0, targets) and considered(1, targets) and price(targets) < price(operands):
            there = _solve(name, shapes, out, targets, ranks=mesh, sizes=sizes)[0]  # the rule can't compute on them
            assert there != [*targets], f"{targets} costs {price(targets)}, {operands} {price(operands)}"


def test_what_is_written_to_stays() -> None:
    shapes, out = [(4, 6), (4, 6)], [(4, 6)]
    assert _solve("add", shapes, out, [Shard(0), R], in_place=0)[0] == [Shard(0), Shard(0)]
    assert _solve("add", shapes, out, [R, Shard(0)], in_place=0)[0] == [R, R]
    with pytest.raises(NoLegalPlacement, match=r"written in place is Partial\(\) on axis 0 of mesh \(2,\)"):
        _solve("add", shapes, out, [P, Shard(0)], in_place=0)


def test_a_factor_that_nothing_explains_is_gathered() -> None:
    made = FactorMap(operands=((0, 1),), results=((1,),))  # dim 0 vanishes, and no reduction says how
    assert solve(made, [(4, 6)], [(Shard(0),)], (2,), [4], [(6,)]).operands == ((R,),)


def test_every_rule_is_bound_in_a_framework() -> None:
    sources = Path(hp_dtensor.__file__).parent
    code = "".join(path.read_text() for folder in ("torch", "mindspore") for path in (sources / folder).rglob("*.py"))
    bound = set(re.findall(r'bind\(\s*"(\w+)"', code))
    assert set(RULES) | {"view"} == bound
