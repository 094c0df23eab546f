"""The sharding rules of the operations, for every framework: one entry each, a line wherever the language suffices.

Each framework binds its functions to these rules, and passes a rule's arguments under the names used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.rules import moving, neural
from hp_dtensor.rules.equation import Rule, Shapes, dims_argument, present, rule
from hp_dtensor.rules.factors import FactorMap

__all__ = ["RULES", "dims_argument"]


# ---- products whose equation depends on their arguments ----
def einsum(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Read the argument ``equation`` as the rule; letters that an operand has twice need replication."""
    text = arguments["equation"].replace(" ", "")
    if "->" not in text:
        letters = text.replace(",", "").replace("...", "")
        text += (
            "->" + ("..." if "..." in text else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
        )
    left, right = text.split("->")
    spaced = [" ".join(term.replace("...", ".")).replace(".", "...") for term in [*left.split(","), right]]
    summed = [letter for letter in dict.fromkeys(left.replace(",", "").replace(".", "")) if letter not in right]
    repeated = [letter for term in left.split(",") for letter in term if letter != "." and term.count(letter) > 1]
    line = rule(
        ", ".join(spaced[:-1]) + " -> " + spaced[-1],
        reduce=" ".join(letter for letter in summed if letter not in repeated),
        need_replication=" ".join(repeated),
        linear="each",
    )
    return line(shapes, results, arguments)


def matmul_transposed(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Describe a product whose operands are transposed if ``transpose_a`` and ``transpose_b`` say so."""
    a = "... k m" if arguments["transpose_a"] else "... m k"
    b = "... n k" if arguments["transpose_b"] else "... k n"
    return rule(f"{a}, {b} -> ... m n", reduce="k", linear="0 1")(shapes, results, arguments)


def rows(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Look up rows along dim ``axis``: dim 0 may be sharded, as in an embedding; any other needs replication."""
    source, index = present(shapes)
    dim = arguments["axis"]
    inner = [f"s{d}" for d in range(len(source))]
    looked = " ".join(f"i{d}" for d in range(len(index)))
    out = " ".join([*inner[:dim], looked, *inner[dim + 1 :]])
    line = f"{' '.join(inner)}, {looked} -> {out}"
    line_rule = rule(line, need_replication=inner[dim]) if dim else rule(line, reduce=inner[dim])
    return line_rule(shapes, results, arguments)


def bias_add(shapes: Shapes, results: Shapes, arguments: Mapping[str, Any]) -> FactorMap:
    """Describe a sum to which one rank adds the bias: the bias's only dim is dim ``channel`` of the input."""
    dims = " ".join(f"d{d}" for d in range(len(present(shapes)[0])))
    return rule(f"{dims}, d{arguments['channel']} -> {dims}", linear="0+1")(shapes, results, arguments)


RULES: dict[str, Rule] = {
    # ---- element by element ----
    "pointwise": rule("...+ -> ...+"),
    "add": rule("...+ -> ...+", linear="several"),  # x + 1 is not linear in x
    "mul": rule("...+ -> ...+", linear="each"),
    "div": rule("...+ -> ...+", linear="0", unless="rounding_mode"),
    "linear_unary": rule("... -> ...", linear="0"),
    "to": rule("...+ -> ...+", linear="0", unless="cast"),  # rounding the terms of a sum is not rounding the sum
    "copy": rule("...+ -> ...+", linear="all", passes="any"),  # clone, and copies into another tensor
    "maximum": rule("...+ -> ...+", linear="all", passes="max"),  # of two tensors
    "minimum": rule("...+ -> ...+", linear="all", passes="min"),
    "forgetful": rule("...+ -> ...+", value_independent=True),
    # ---- products ----
    "linear": rule("... k, n k -> ... n | ... k, n k, n -> ... n", reduce="k", linear="0 1", bias="2"),
    "matmul": rule(
        "... m k, ... k n -> ... m n | ... m k, k -> ... m | k, ... k n -> ... n | k, k -> ",
        reduce="k",
        linear="0 1",
    ),
    "outer": rule("m, n -> m n", linear="0 1"),
    "embedding": rule("..., v d -> ... d", reduce="v", contiguous="v"),
    "embedding_of": rule("..., v d -> ... d", need_replication="v"),
    # groups of rows, each with its own matrix; the third operand has the ends of the groups
    "grouped_matmul": rule(
        "t k, e k n, e -> t n | g m k, g k n -> g m n | replicate", reduce="k", need_replication="t e", linear="0 1"
    ),
    "einsum": einsum,
    "matmul_transposed": matmul_transposed,
    "rows": rows,
    "bias_add": bias_add,
    # ---- reductions ----
    "sum": rule("* -> * - dim", reduce="dim", linear="0"),
    "mean": rule("* -> * - dim", reduce="dim", linear="0"),
    "max": rule("* -> * - dim", reduce="dim:max", nonempty="dim"),  # any
    "min": rule("* -> * - dim", reduce="dim:min", nonempty="dim"),  # all
    "amax": rule("* -> * - dim", reduce="dim:max", nonempty="dim", linear="0", passes="max"),
    "amin": rule("* -> * - dim", reduce="dim:min", nonempty="dim", linear="0", passes="min"),
    "product": rule("* -> * - dim", reduce="dim:product"),
    "histogram": rule("* -> bins", reduce="*"),  # counts between the bounds are sums over all elements
    "whole_reduction": rule("* -> * - dim", need_replication="dim"),  # argmax, norm: gather the reduced dims
    "statistics": rule(
        "* -> * - dim", need_replication="dim", nonempty="*"
    ),  # var, std: torch warns about empty shards
    # ---- along a dim ----
    "whole_dims": rule("* -> *", need_replication="dim"),  # softmax, topk, sort; ``dim`` may change its size
    "linear_whole_dims": rule("* -> *", need_replication="dim", linear="0"),  # cumsum, tril
    "moved_whole_dims": rule("* -> *", need_replication="dim", linear="0", passes="any"),  # flip, roll, narrow, split
    "unbind": rule("* -> * - dim", dim=0, need_replication="dim", linear="0", passes="any"),
    "pad": moving.pad,
    # ---- moves ----
    "pairs": moving.pairs,
    "permute": moving.permute,
    "expand": moving.expand,
    "cat": moving.cat,
    "stack": moving.stack,
    "index": moving.index,
    "gather": moving.gather,
    "masked_gather": moving.masked_gather,
    # ---- networks ----
    "norm": neural.norm,
    "layer_norm": neural.layer_norm,
    "batch_norm": neural.batch_norm,
    "attention": neural.attention,
    "cross_entropy": neural.cross_entropy,
    "loss": neural.loss,
    "rows_loss": neural.rows_loss,
    "prelu": neural.prelu,
    "convolution": neural.convolution,
    "leading": neural.leading,  # pools, interpolation
    "channels": neural.channels,  # group_norm, instance_norm, and batch_norm in evaluation
    "images": neural.images,
    "whole": rule("replicate"),
}
"""The rule of each operation, by name."""
