"""Bounds of a number in a section, which `hp_plan.reading.tables` checks."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def at_least(minimum: float, default: Any) -> Any:
    """Declare a number, or a list of numbers, that is not less."""
    return field(default=default, metadata={"minimum": minimum})


def more_than(bound: float, default: Any) -> Any:
    """Declare a number above a bound."""
    return field(default=default, metadata={"above": bound})


def within(minimum: float, below: float, default: Any) -> Any:
    """Declare a number that is not less than the minimum, and below a bound."""
    return field(default=default, metadata={"minimum": minimum, "below": below})


def each_within(minimum: float, below: float, default: Any) -> Any:
    """Declare a list of such numbers."""
    return field(default=default, metadata={"minimum": minimum, "below": below})
