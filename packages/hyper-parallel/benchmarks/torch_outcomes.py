"""What the outcomes of torch's tests mean: the first rule whose pattern is in an outcome's text names its class."""

from __future__ import annotations

import re
from typing import Any

CLASSES = ("passed", "skipped", "fails on torch", "torch internals", "other on purpose", "refused", "bug", "not judged")

INTERNAL: tuple[tuple[str, str, str], ...] = (
    (r"TorchInternalError: ", "torch internals", "uses a private name"),
    (r"AttributeError: .* has no attribute '_", "torch internals", "uses a private attribute"),
    (r"AttributeError: 'function' object has no attribute 'state'", "torch internals", "reads FSDP's state"),
    (r"AttributeError: 'TensorSpec' object has no attribute", "torch internals", "reads a DTensor's spec"),
    (r"AbsentNameError: ", "other on purpose", "uses a public name that these packages don't have"),
)
RULES: tuple[tuple[str, str, str], ...] = (
    (r'AssertionError: "[^\n]*" does not match "', "torch internals", "refused here too, in other words than torch's"),
    (r"AsyncCollectiveTensor", "torch internals", "the class of a result of a functional collective"),
    (r"AssertionError: [^\n]*RaggedShard", "other on purpose", "fully_shard's shards are ragged"),
    (
        r'File "[^"]*/hp_\w+/[^"]*", line \d+, in \S+\n\s+raise [^\n]*\n(?:\s+\^+\n)?\w+Error: ',
        "refused",
        "by an error of these packages",
    ),
)
READ: dict[str, tuple[str, str]] = {}


def judge(row: dict[str, Any]) -> tuple[str, str]:
    """Return the class of an outcome, and why."""
    text, outcome = row["text"], row["outcome"]
    if outcome == "passed" and "counted" in row:
        return "other on purpose", "other collectives, right values"
    if outcome in ("passed", "skipped"):
        return outcome, text[:200]
    if row["test"] in READ:
        return READ[row["test"]]
    for rules in (INTERNAL, RULES):
        for pattern, kind, why in rules:
            if re.search(pattern, text):
                return kind, why
        if row.get("torch") and row["torch"]["outcome"] != "passed":
            return "fails on torch", row["torch"]["outcome"]
    return "not judged", ""
