"""The rules of a Muon: the user's, and those of attention projections whose heads are matrices of their own."""

from __future__ import annotations

from collections.abc import Sequence

from hp_optim.rules import MatrixRule

__all__ = ["HEAD_WISE_PATTERNS", "all_rules"]

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
