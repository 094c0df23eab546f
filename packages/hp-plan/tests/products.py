"""Random products of a model family, mesh axes, options of a plan and habits of users."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from families import FAMILIES, LENGTH, text, two_texts
from habits import HABITS

from hp_plan import ParallelPlan

TEXT = tuple(
    name
    for name, family in FAMILIES.items()
    if family.inputs in (text, two_texts) and name != "phimoe"  # its router draws
)
EXPERTS = tuple(
    name
    for name, family in FAMILIES.items()
    if any("experts" in key for key in family.overrides) and name in TEXT and name not in ("jamba", "granitemoehybrid")
)
AXES: tuple[dict[str, int], ...] = (
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2},
    {"dp_shard": 2, "ep": 2},
    {"tp": 2, "ep": 2},
    {"dp_shard": 4},
    {"tp": 4},
    {"cp": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_replicate": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "dp_replicate": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "cp": 2},
    {"dp_shard": 4, "ep": 4},
    {"dp_shard": 2, "tp": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2, "ep": 2},
    {"pp": 2, "dp_shard": 2, "ep": 2},
)
FOUR_LAYERS = ("interleaved", "looped-bfs", "zbv", "v-half", "v-min", "dualpipev")
_RECOMPUTED = dict.fromkeys(("gpt2", "bloom", "falcon", "gptj"), ("*.h.*",))
_RECOMPUTED |= {"bert": ("*.layer.*",), "roberta": ("*.layer.*",), "t5": ("*.block.*",), "mamba2": ("*.layers.*",)}


@dataclass(frozen=True)
class Product:
    """One run: a plan's tables, and what a user does beside.

    Attributes:
        family: of `FAMILIES`.
        tables: of the plan, without `[model]`.
        habits: names of `HABITS`.
        padding: which side of a sample is padding, if any.
        layers: hidden layers of the model; 0 leaves the family's.
        one_batch: one process computes the samples of all ranks in one forward, and not one micro-batch after another.
    """

    family: str
    tables: dict[str, Any] = field(default_factory=dict)
    habits: tuple[str, ...] = ()
    padding: str = ""
    layers: int = 0
    one_batch: bool = False

    def plan(self) -> ParallelPlan:
        """The plan."""
        family = FAMILIES[self.family]
        overrides = {**family.overrides, **({"num_hidden_layers": self.layers} if self.layers else {})}
        model = {"config": family.config, "overrides": overrides} | ({"task": family.task} if family.task else {})
        return ParallelPlan.from_dict({"model": model, **self.tables})

    def inputs(self, samples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Samples for the model."""
        make = FAMILIES[self.family].inputs
        assert make is not None
        return make(samples, generator)

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes."""
        return self.tables["mesh"]

    @property
    def ranks(self) -> int:
        """How many it runs on."""
        return ParallelPlan.from_dict({"mesh": self.mesh}).mesh.world_size

    def __str__(self) -> str:
        said = [self.family, *(f"{name} {size}" for name, size in self.mesh.items())]
        for section, keys in self.tables.items():
            if section == "styles":
                said.append(f"styles={keys}")
            elif section not in ("mesh", "data"):
                said += [f"{section}.{key}={value}" for key, value in keys.items() if key != "dtype"]
        return ", ".join([*said, *([f"padding {self.padding}"] if self.padding else []), *self.habits])


def draw(number: int) -> Product:
    """Return the product of a number: the same for each caller."""
    chance = random.Random(number)
    mesh = chance.choice(AXES)
    family = chance.choice(EXPERTS if "ep" in mesh or chance.random() < 0.2 else TEXT)
    tables: dict[str, Any] = {"mesh": dict(mesh), "run": {"dtype": "float64"}}
    product = Product(family, tables)
    if "tp" in mesh:
        tables["styles"] = chance.choice(("auto", "auto", "auto-sequence"))
    if {"dp_shard", "dp_replicate", "cp"} & mesh.keys():
        _draw_fsdp(chance, tables, mesh)
    if "cp" in mesh:
        degree = chance.choice((None, 1, 2))
        tables["context"] = {"load_balance": chance.random() < 0.5, **({"ulysses_degree": degree} if degree else {})}
    if "ep" in mesh:
        options = {"combine": ("fast", "exact"), "exchange": ("all_to_all", "all_gather"), "chunks": (1, 2)}
        some = chance.sample(sorted(options), 1)
        tables["experts"] = {name: chance.choice(options[name]) for name in some}
    if "pp" in mesh:
        product = replace(product, layers=_draw_pipeline(chance, tables, family))
    if "pp" not in mesh and chance.random() < 0.3:
        tables["run"]["accumulate"] = 2
    if chance.random() < 0.2:
        tables["memory"] = {"recompute": [chance.choice(_RECOMPUTED.get(family, ("*.layers.*", "*.layers.*.mlp")))]}
    tables["optimizer"] = {"name": chance.choice(("adamw", "adamw", "sgd", "muon")), "lr": 0.01}
    if chance.random() < 0.5:
        tables["run"]["grad_clip"] = 0.5
    parts = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    tables["data"] = {"sequence_length": LENGTH, "batch_size": 4 * parts}
    wanted = [name for name, habit in HABITS.items() if habit.fits(product.plan(), family)]
    habits = tuple(sorted(chance.sample(wanted, chance.choice((0, 1, 1, 1, 2)))))
    padding = chance.choice(("left", "right")) if "pp" not in mesh and chance.random() < 0.2 else ""
    return replace(product, habits=habits, padding=padding)


def _draw_fsdp(chance: random.Random, tables: dict[str, Any], mesh: dict[str, int]) -> None:
    fsdp: dict[str, Any] = {}
    if {"dp_shard", "cp"} & mesh.keys():
        kept = chance.choice((True, True, False))
        fsdp |= {} if kept else {"reshard_after_forward": False}
        fsdp |= chance.choice(({}, {}, {"offload": True}))
    fsdp |= chance.choice(({}, {}, {"groups": [""]}))
    if fsdp:
        tables["fsdp"] = fsdp


def _draw_pipeline(chance: random.Random, tables: dict[str, Any], family: str) -> int:
    schedule = chance.choice(("1f1b", "gpipe", "zb1p", "zb2p", *FOUR_LAYERS))
    tables["pipeline"] = {"schedule": schedule, "micro_batches": chance.choice((2, 4))}
    overrides = FAMILIES[family].overrides
    own = "layer_types" in overrides or "attn_layer_indices" in overrides or "num_hidden_layers" not in overrides
    if schedule in FOUR_LAYERS and own:
        tables["pipeline"]["schedule"] = "1f1b"
        return 0
    return 4 if schedule in FOUR_LAYERS else 0


@dataclass(frozen=True)
class Sabotaged(Product):
    """A small Llama with a change.

    Attributes:
        kind: of `sabotage.KINDS` or `sabotage.LOSSES`.
    """

    kind: str = "nothing"
    one_batch: bool = True

    def plan(self) -> ParallelPlan:
        """The plan, whose model is a function's."""
        return ParallelPlan.from_dict(
            {"model": {"function": "sabotage:build", "overrides": {"kind": self.kind}}, **self.tables}
        )


def sabotaged(axis: str) -> dict[str, Any]:
    """The tables of a plan for two ranks of an axis, as users write it."""
    tables: dict[str, Any] = {"mesh": {axis: 2}, "run": {"dtype": "float64", "accumulate": 1}}
    tables["data"] = {"sequence_length": LENGTH, "batch_size": 4}
    return tables | ({"pipeline": {"micro_batches": 2}} if axis == "pp" else {})
