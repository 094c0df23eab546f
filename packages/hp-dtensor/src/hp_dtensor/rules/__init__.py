"""Sharding rules: which placements of an operation's operands give which placements of its results."""

from hp_dtensor.rules.equation import rule
from hp_dtensor.rules.factors import FactorMap, NoLegalPlacement, Solution, solve
from hp_dtensor.rules.library import RULES
from hp_dtensor.rules.planning import view_placements

__all__ = ["RULES", "FactorMap", "NoLegalPlacement", "Solution", "rule", "solve", "view_placements"]
