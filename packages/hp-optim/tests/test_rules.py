"""Which matrices a parameter is made of, against numpy's reshapes."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from hp_optim.muon.rules import Matrix, MatrixRule, rule_of, split


def cut(shape: tuple[int, ...], rule: MatrixRule | None) -> list[np.ndarray]:
    array = np.arange(prod(shape)).reshape(shape)
    boxes = split(shape, rule, "w")
    return [
        array[tuple(slice(o, o + s) for o, s in zip(each.offsets, each.sizes))].reshape(each.rows, each.columns)
        for each in boxes
    ]


def equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


A = np.arange(240)


@pytest.mark.parametrize(
    ("shape", "rule", "expected"),
    [
        ((12, 20), None, [A.reshape(12, 20)]),
        ((3, 8, 10), None, list(A.reshape(3, 8, 10))),
        ((2, 3, 4, 10), None, list(A.reshape(6, 4, 10))),
        ((12, 20), MatrixRule("w", "o i"), [A.reshape(12, 20)]),
        ((3, 8, 10), MatrixRule("w", "e o i"), list(A.reshape(3, 8, 10))),
        ((12, 20), MatrixRule("w", "(h o) i", {"o": 4}), list(A.reshape(3, 4, 20))),
        ((12, 20), MatrixRule("w", "(h o) i", {"h": 4}), list(A.reshape(4, 3, 20))),
        ((12, 20), MatrixRule("w", "(q | k | v) i"), list(A.reshape(3, 4, 20))),
        ((12, 20), MatrixRule("w", "(q | k | v) i", {"q": 6, "k": 3}), np.split(A.reshape(12, 20), [6, 9])),
        (
            (12, 20),
            MatrixRule("w", "(h o | k o | v o) i", {"h": 4, "k": 1, "v": 1}),
            list(A.reshape(6, 2, 20)),
        ),
        ((12, 20), MatrixRule("w", "o (up | gate)"), np.split(A.reshape(12, 20), 2, axis=1)),
        ((4, 6, 10), MatrixRule("w", "e (gate | up) i"), list(A.reshape(8, 3, 10))),
        ((8, 5, 2, 3), MatrixRule("w", "o (i kh kw)"), [A.reshape(8, 30)]),
        ((2, 4, 5, 2, 3), MatrixRule("w", "g o (i kh kw)"), list(A.reshape(2, 4, 30))),
        ((8, 30), MatrixRule("w", "h (o i)", {"o": 5}), list(A.reshape(8, 5, 6))),
        ((240,), MatrixRule("w", "(h o i)", {"o": 5, "i": 8}), list(A.reshape(6, 5, 8))),
    ],
)
def test_the_matrices_of_a_rule(shape: tuple[int, ...], rule: MatrixRule | None, expected: list[np.ndarray]):
    equal(cut(shape, rule), expected)


@pytest.mark.parametrize(
    ("shape", "rule", "text"),
    [
        ((7,), None, r"'w' of shape \(7,\) has 1 dims, and only matrices can be orthogonalized"),
        ((), None, r"has 0 dims"),
        ((10, 4), MatrixRule("w", "(h o) i", {"o": 4}), r"dim 0 of size 10 is not a multiple of 4, so index 'h'"),
        ((10, 4), MatrixRule("w", "(h o) i"), r"leaves 2 indices open \(h, o\); name all but one"),
        ((10, 4), MatrixRule("w", "(q | k | v) i"), r"3 equal parts do not divide dim 0 of size 10; name their s"),
        ((10, 4), MatrixRule("w", "(q | k) i", {"q": 3, "k": 3}), r"sizes of dim 0 add up to 6, and it has 10"),
        ((10, 4), MatrixRule("w", "(q | k) i", {"q": 12}), r"dim 0 of size 10 less 12 is not a multiple"),
        ((10, 4), MatrixRule("w", "e o i"), r"describes 3 dims, and the shape \(10, 4\) has 2"),
        ((3, 4, 5, 6), MatrixRule("w", "(a b) i"), r"describes 2 dims or 3, and the shape"),
        ((3, 4, 5, 6), MatrixRule("w", "o (i kh kw)", {"kh": 2}), r"index 'kh' is 2, and dim 2 of"),
        ((10,), MatrixRule("w", "o"), r"names one index, a matrix has two"),
    ],
)
def test_a_rule_that_does_not_fit(shape: tuple[int, ...], rule: MatrixRule | None, text: str):
    with pytest.raises(ValueError, match=text):
        split(shape, rule, "w")
    if "; name" in text:
        sizes = {"q": 4, "k": 3} if "equal" in text else {"h": 5}
        assert len(split(shape, MatrixRule("w", rule.matrices, sizes), "w")) == (3 if "equal" in text else 5)


@pytest.mark.parametrize(
    ("matrices", "sizes", "text"),
    [
        ("o, i", {}, r"cannot be read at ','"),
        ("(o | ) i", {}, r"cannot be read at"),
        ("(h h) i", {}, r"appears twice in \(h h\)"),
        ("", {}, r"names no indices"),
        ("o i", {"h": 3}, r"sizes has 'h', which is no index of 'o i'"),
        ("(h o) i", {"h": 0}, r"size 0 of index 'h' must be a positive"),
    ],
)
def test_a_text_that_cannot_be_read(matrices: str, sizes: dict[str, int], text: str):
    with pytest.raises(ValueError, match=text):
        MatrixRule("w", matrices, sizes)
    for written in ("o i", "(h o) i", "(q | k | v) i"):
        parts = split((12, 4), MatrixRule("w", written, {"h": 2} if "h" in written else {}), "w")
        assert len(parts) == {"o i": 1, "(h o) i": 2}.get(written, 3)


def test_rules_are_values_and_chosen_by_name():
    heads, fused = MatrixRule("*.q.weight", "(h o) i", {"o": 4}), MatrixRule("*.qkv.weight", "(q | k | v) i")
    assert heads == MatrixRule("*.q.weight", "(h o) i", (("o", 4),)) and hash(heads) == hash(eval(repr(heads)))
    assert rule_of("layers.0.q.weight", [heads, fused]) is heads
    assert rule_of("layers.0.up.weight", [heads, fused]) is None
    assert fused.split((6, 4))[1] == Matrix((2, 0), (2, 4), 2, 4)
    with pytest.raises(ValueError, match=r"'a.q.weight' is matched by '\*.q.weight' and 'a.\*'"):
        rule_of("a.q.weight", [heads, MatrixRule("a.*")])
    assert rule_of("a.q.weight", [heads, MatrixRule("a.[!q]*")]) is heads
