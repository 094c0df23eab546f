"""The plans of a number of ranks, as arrays: what a base plan leaves open, and the rules by which plans fall out.

Note [What is chosen]
A key that the base plan's tables give is kept, whatever its value; `tp = 1` too. What they leave out is chosen: the
sizes under `[mesh]`, micro-batches (`run.accumulate`, or `pipeline.micro_batches` with stages), `memory.recompute`
(nothing, or all blocks), `fsdp.reshard_after_forward` (true or false) and `pipeline.schedule`. `free` names keys
(`"mesh.tp"`) or sections (`"mesh"`) that are chosen in spite of being given. All else, as the batch and the sequence
length, is the base plan's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import near_misses
from hp_plan.sections import DataSection, FsdpSection, PipelineSection
from hp_plan.structure.outline import ModelOutline, block_lists
from hp_plan.tuning.hardware import Hardware

Columns = Mapping[str, NDArray[np.int64]]
"""For each of `COLUMNS` a number a plan."""

MESH = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
COLUMNS = (*MESH, "micro_batches", "recompute", "reshard", "schedule")
SCHEDULES = ("", "1f1b", "interleaved", "zbv")
"""By their number in the column; the first stands for no stages."""
_CHOSEN = {
    **{axis: (f"mesh.{axis}",) for axis in MESH},
    "micro_batches": ("run.accumulate", "pipeline.micro_batches"),
    "recompute": ("memory.recompute",),
    "reshard": ("fsdp.reshard_after_forward",),
    "schedule": ("pipeline.schedule",),
}
_FEWEST_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What rules and traces have to know of a model.

    Attributes:
        layers: its blocks.
        heads: of attention.
        kv_heads: heads of keys and values.
        experts: of a layer; 0 where there are none.
        blocks: patterns of the blocks' names, such as `"model.layers.*"`, for `memory.recompute`.
        layers_key: the setting under `[model.overrides]` that says how many blocks there are.
        period: after so many blocks the next are like the first: 2 where every second has experts, 1 where all are
            alike.
    """

    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    blocks: tuple[str, ...] = ("model.layers.*",)
    layers_key: str = "num_hidden_layers"
    period: int = 1

    @classmethod
    def of(cls, outline: ModelOutline, *, period: int = 1) -> ModelSizes:
        """Read them off a model of transformers.

        Raises:
            ValueError: its configuration does not say how many blocks or heads it has.
        """
        config = outline.config
        found = [getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads")]
        if None in found:
            raise ValueError(
                f"{outline.type_name} has no num_hidden_layers or num_attention_heads in its configuration, by which"
                " plans are chosen: give ModelSizes(layers=, heads=, kv_heads=) yourself."
            )
        layers, heads = (int(each) for each in found if each is not None)
        experts = max((each.experts.count for each in outline.modules.values() if each.experts), default=0)
        named = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            experts=experts,
            blocks=tuple(block_lists(outline)),
            layers_key=named,
            period=period,
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason for which plans fall out.

    Attributes:
        holds: from columns, derived columns and numbers of the model, by attribute, to True for each plan that stays.
        of_mesh: it asks for the mesh alone.
    """

    holds: Callable[[Any], Any]
    of_mesh: bool = True


RULES: dict[str, Rule] = {
    "tp stays within a host": Rule(lambda x: x.tp <= x.host),
    "tp divides the heads": Rule(lambda x: x.heads % x.tp == 0),
    "tp divides the heads of keys and values": Rule(lambda x: x.kv_heads % x.tp == 0),
    "pp divides the layers": Rule(lambda x: (x.pp == 1) | (x.layers % (x.pp * x.period) == 0)),
    "2 cp divides the sequence length": Rule(lambda x: (x.cp == 1) | (x.length % (x.chunks * x.cp) == 0)),
    "cp leaves a rank 512 tokens": Rule(lambda x: (x.cp == 1) | (x.length >= _FEWEST_TOKENS * x.cp)),
    "ep divides the ranks that share a copy": Rule(lambda x: x.dp_shard * x.cp * x.tp % x.ep == 0),
    "ep is a multiple of tp, or divides the other ranks": Rule(
        lambda x: (x.ep % x.tp == 0) | (x.dp_shard * x.cp % x.ep == 0)
    ),
    "ep divides the experts": Rule(lambda x: (x.ep == 1) | (x.experts % x.ep == 0)),
    "the batch divides over dp": Rule(lambda x: x.batch % (x.dp_replicate * x.dp_shard) == 0),
    "[fsdp] has an effect": Rule(
        lambda x: (not x.fsdp) | (x.dp_replicate * x.dp_shard * x.cp > 1) | (x.tp * x.pp == 1)
    ),
    "[context] has an effect": Rule(lambda x: (not x.context) | (x.cp > 1)),
    "[experts] has an effect": Rule(lambda x: (not x.expert_options) | (x.ep > 1)),
    "[pipeline] has an effect": Rule(lambda x: (not x.pipeline) | (x.pp > 1)),
    "run.accumulate has an effect": Rule(lambda x: (not x.accumulate) | (x.pp == 1)),
    "micro-batches divide a rank's samples": Rule(lambda x: x.samples % x.micro_batches == 0, of_mesh=False),
    "micro-batches are at least pp": Rule(lambda x: (x.pp == 1) | (x.micro_batches >= x.pp), of_mesh=False),
    "the blocks divide over the stages": Rule(
        lambda x: (x.pp == 1) | (x.layers % (x.pp * x.chunks_a_rank * x.period) == 0), of_mesh=False
    ),
}
"""Asked in this order: a plan counts under the first that it breaks."""


@dataclass(frozen=True)
class Space:
    """Plans that no rule refuses.

    Attributes:
        base: tables without what the columns say.
        ranks: of each plan.
        model: numbers of the model.
        columns: a number a plan for each of `COLUMNS`. `recompute` and `reshard` are 0 or 1, `schedule` is a place in
            `SCHEDULES`; where the base plan gives `memory.recompute` or `fsdp.reshard_after_forward` they stay 0 and 1,
            and the given value is used.
        fell_out: rule -> how many plans it refuses.
        searched: plans in all, those that fell out too.
    """

    base: Mapping[str, Any]
    ranks: int
    model: ModelSizes
    columns: Columns
    fell_out: Mapping[str, int]
    searched: int

    def __len__(self) -> int:
        return len(self.columns["pp"])

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return _given(self.base, "data.batch_size", DataSection.batch_size)

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return _given(self.base, "data.sequence_length", DataSection.sequence_length)

    @property
    def stages_a_rank(self) -> tuple[int, ...]:
        """For each of `SCHEDULES` the stages of a rank."""
        return _stages_a_rank(self.base)

    def row(self, index: int) -> dict[str, int]:
        """Return the numbers of one plan."""
        return {name: int(column[index]) for name, column in self.columns.items()}

    def tables(self, row: Mapping[str, int], **data: int) -> dict[str, Any]:
        """Write the tables of a plan.

        Args:
            row: a number for each of `COLUMNS`.
            data: values under `[data]` in place of the base plan's, and `layers`, the model's.
        """
        layers, pp = data.pop("layers", None), row["pp"]
        chosen: dict[str, dict[str, Any]] = {"mesh": {axis: row[axis] for axis in MESH if row[axis] > 1}, "data": data}
        if pp > 1:
            given = layers is None and "split" in self.base.get("pipeline", {})
            split = {} if given else {"split": "even"}
            name = SCHEDULES[row["schedule"]]
            chosen["pipeline"] = {"schedule": name, "micro_batches": row["micro_batches"], **split}
        elif row["micro_batches"] > 1:
            chosen["run"] = {"accumulate": row["micro_batches"]}
        if row["recompute"]:
            chosen["memory"] = {"recompute": list(self.model.blocks)}
        if not row["reshard"]:
            chosen["fsdp"] = {"reshard_after_forward": False}
        if layers is not None:
            overrides = self.base.get("model", {}).get("overrides", {})
            chosen["model"] = {"overrides": {**overrides, self.model.layers_key: layers}}
        tables = dict(self.base)
        for section, values in chosen.items():
            tables[section] = {**tables.get(section, {}), **values}
        return {name: table for name, table in tables.items() if table != {}}

    def plan(self, index: int) -> ParallelPlan:
        """Return one plan."""
        return ParallelPlan.from_dict(self.tables(self.row(index)))


def enumerate_plans(
    tables: Mapping[str, Any], ranks: int, model: ModelSizes, hardware: Hardware, *, free: Collection[str] = ()
) -> Space:
    """List the plans of a number of ranks: Note [What is chosen].

    Args:
        tables: of the base plan.
        ranks: of each plan.
        model: numbers of the model.
        hardware: whose innermost level is a host.
        free: keys or sections that are chosen although `tables` gives them.

    Raises:
        ValueError: `free` names what is not chosen, or a given value is none that can be kept.
    """
    kept, base = _kept(tables, free)
    if ranks < 1:
        raise ValueError(f"got {ranks} ranks, expected one at least.")
    meshes = _meshes(ranks, kept, model)
    space = Space(base, ranks, model, {}, {}, 0)
    stages = space.stages_a_rank
    options = _options(space.batch, kept, stages)
    known = _facts(space, hardware, kept)
    # Options that a mesh has no use for are none of its plans.
    columns: dict[str, NDArray[np.int64]] = dict(zip(MESH, meshes.T, strict=True))
    sharded, staged = columns["dp_shard"] * columns["cp"] > 1, columns["pp"] > 1
    uses = [_uses(options, bool(shards), bool(stage)) for shards, stage in itertools.product((0, 1), (0, 1))]
    kind = 2 * sharded.astype(np.int64) + staged
    weights = np.array([each.sum() for each in uses])[kind]
    fell_out: dict[str, int] = {}
    searched = int(weights.sum())
    stays = np.ones(len(meshes), dtype=bool)
    for name, rule in RULES.items():
        if rule.of_mesh:
            holds = np.broadcast_to(rule.holds(SimpleNamespace(**known, **columns)), stays.shape)
            fell_out[name] = int(weights[stays & ~holds].sum())
            stays &= holds
    parts = []
    for number, used in enumerate(uses):
        rows, chosen = meshes[stays & (kind == number)], options[used]
        parts.append(np.hstack([np.repeat(rows, len(chosen), 0), np.tile(chosen, (len(rows), 1))]))
    plans = np.concatenate(parts)
    columns: dict[str, NDArray[np.int64]] = dict(zip(COLUMNS, plans.T, strict=True))
    columns["samples"] = space.batch // (columns["dp_replicate"] * columns["dp_shard"])
    columns["chunks_a_rank"] = np.array(stages)[columns["schedule"]]
    stays = np.ones(len(plans), dtype=bool)
    for name, rule in RULES.items():
        if not rule.of_mesh:
            holds = np.broadcast_to(rule.holds(SimpleNamespace(**known, **columns)), stays.shape)
            fell_out[name] = int(np.count_nonzero(stays & ~holds))
            stays &= holds
    plans = plans[stays]
    plans = plans[np.lexsort(plans.T[::-1])]
    found = {name: np.ascontiguousarray(column) for name, column in zip(COLUMNS, plans.T, strict=True)}
    return Space(base, ranks, model, found, {name: count for name, count in fell_out.items() if count}, searched)


def _kept(tables: Mapping[str, Any], free: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the kept values by column, and the tables without values that are chosen."""
    keys = {key: column for column, names in _CHOSEN.items() for key in names}
    choices = [*keys, *dict.fromkeys(key.partition(".")[0] for key in keys)]
    for name in free:
        if name not in choices:
            raise ValueError(f"free: {name!r} is not chosen; {near_misses(name, choices)}.")
    kept: dict[str, Any] = {}
    base = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    for key, column in keys.items():
        section, _, name = key.partition(".")
        if name not in base.get(section, {}):
            continue
        given = key not in free and section not in free
        if given:
            kept[column] = kept[key] = base[section][name]
        if not given or column not in ("recompute", "reshard"):  # whose value no column holds
            del base[section][name]
    if "schedule" in kept and kept["schedule"] not in SCHEDULES[1:]:
        raise ValueError(
            f"got pipeline.schedule = {kept['schedule']!r}, but plans are chosen among {', '.join(SCHEDULES[1:])}: name"
            " it in free, or take one of these."
        )
    return kept, {name: table for name, table in base.items() if table != {}}


def _given(tables: Mapping[str, Any], key: str, default: Any) -> Any:
    section, _, name = key.partition(".")
    return tables.get(section, {}).get(name, default)


def _stages_a_rank(base: Mapping[str, Any]) -> tuple[int, ...]:
    return 1, 1, _given(base, "pipeline.stages_per_rank", 2), 2


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _meshes(ranks: int, kept: Mapping[str, Any], model: ModelSizes) -> NDArray[np.int64]:
    """List the sizes of axes whose product is the number of ranks, with each size of `ep`."""

    def sizes(axis: str, rest: int) -> list[int]:
        if axis not in kept:
            return _divisors(rest)
        return [kept[axis]] if rest % kept[axis] == 0 else []

    rows = []
    for tp in sizes("tp", ranks):
        for cp in sizes("cp", ranks // tp):
            for pp in sizes("pp", ranks // (tp * cp)):
                rest = ranks // (tp * cp * pp)
                for shard in sizes("dp_shard", rest):
                    for replicate in sizes("dp_replicate", rest // shard):
                        if replicate * shard == rest:
                            rows.append((replicate, shard, cp, tp, pp))
    if "ep" in kept:
        experts = [kept["ep"]]
    else:
        experts = [each for each in _divisors(ranks) if each <= max(1, model.experts)]
    spread = [
        (*row, ep) for row in rows for ep in experts if ep == 1 or "ep" in kept or row[1] * row[2] * row[3] % ep == 0
    ]
    return np.array(spread, dtype=np.int64).reshape(-1, len(MESH))


def _options(batch: int, kept: Mapping[str, Any], stages: Sequence[int]) -> NDArray[np.int64]:
    micro_batches = [kept["micro_batches"]] if "micro_batches" in kept else _divisors(batch)
    recompute = [0] if "recompute" in kept else [0, 1]
    reshard = [1] if "reshard" in kept else [0, 1]
    schedules = [SCHEDULES.index(kept["schedule"])] if "schedule" in kept else range(1, len(SCHEDULES))
    options = itertools.product(micro_batches, recompute, reshard, (0, *schedules))
    return np.array(list(options), dtype=np.int64)


def _uses(options: NDArray[np.int64], sharded: bool, staged: bool) -> NDArray[np.bool_]:
    """Tell which options a mesh has a use for: without shards nothing reshards, without stages there is no schedule."""
    reshard, schedule = options[:, 2], options[:, 3]
    return (sharded | (reshard == 1)) & ((schedule > 0) == staged)


def _facts(space: Space, hardware: Hardware, kept: Mapping[str, Any]) -> dict[str, Any]:
    base, model = space.base, space.model
    fsdp = {name: each for name, each in base.get("fsdp", {}).items() if each != getattr(FsdpSection, name, None)}
    pipeline = {
        name: each for name, each in base.get("pipeline", {}).items() if each != getattr(PipelineSection, name, None)
    }
    return {
        "host": hardware.levels[0].ranks or space.ranks,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "layers": model.layers,
        "period": model.period,
        "experts": model.experts,
        "length": space.length,
        "batch": space.batch,
        "chunks": 2 if _given(base, "context.load_balance", True) else 1,
        "fsdp": bool(fsdp),
        "context": bool(base.get("context")),
        "expert_options": bool(base.get("experts")),
        "pipeline": bool(pipeline) or "pipeline.micro_batches" in kept or kept.get("schedule", "1f1b") != "1f1b",
        "accumulate": "run.accumulate" in kept and kept["micro_batches"] > 1,
    }
