"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_plan.checks.alike import draws
from hp_plan.checks.monitor.origin import decode, earliest, encode
from hp_plan.checks.monitor.readings import ALONE, COUNTED, PHASES, ReadingsFile
from hp_plan.checks.precision import precision_notes
from hp_plan.checks.sdc.checks import sdc_notes
from hp_plan.checks.sdc.copies import WEIGHT, Unequal
from hp_plan.checks.sdc.rotation import Rotation
from hp_plan.checks.sdc.voting import COMPUTATIONS, Computed, Finding, first_difference, vote
from hp_plan.checks.verification import TORCH_ONLY
from hp_plan.dry.picture import draw_memory
from hp_plan.features.adapters import saved_name
from hp_plan.features.communication import notes as traffic_notes
from hp_plan.features.communication import with_order
from hp_plan.features.loss import cut_rows, share_out
from hp_plan.features.optimizers import multiple_of_first
from hp_plan.features.pipelines import Choice, Outlook, outlook
from hp_plan.linting import UNREAD, Report, examine, memory_shortage, refuse_by_itself
from hp_plan.plan import data_parallel_place, data_parallel_rows, json_schema, read_plan, read_toml
from hp_plan.port import build, verifier
from hp_plan.reading.diagnostics import near_misses
from hp_plan.reading.overrides import Setting, override, settings
from hp_plan.structure.model_source import vocabulary
from hp_plan.structure.outline import positions
from hp_plan.structure.style_tables import style_notes
from hp_plan.tuning.proposal import Estimate, Play, Proposal, propose
from hp_plan.tuning.search import NothingFits, Tuned, tuned_text

__all__ = [
    "ALONE",
    "COMPUTATIONS",
    "Computed",
    "Finding",
    "Rotation",
    "Unequal",
    "WEIGHT",
    "first_difference",
    "sdc_notes",
    "vote",
    "COUNTED",
    "PHASES",
    "ReadingsFile",
    "decode",
    "earliest",
    "encode",
    "Choice",
    "NothingFits",
    "Tuned",
    "tuned_text",
    "Estimate",
    "Outlook",
    "Play",
    "Proposal",
    "Report",
    "Setting",
    "TORCH_ONLY",
    "UNREAD",
    "build",
    "cut_rows",
    "data_parallel_place",
    "data_parallel_rows",
    "draw_memory",
    "draws",
    "examine",
    "json_schema",
    "memory_shortage",
    "multiple_of_first",
    "near_misses",
    "outlook",
    "positions",
    "precision_notes",
    "propose",
    "override",
    "read_plan",
    "read_toml",
    "refuse_by_itself",
    "saved_name",
    "settings",
    "share_out",
    "style_notes",
    "traffic_notes",
    "verifier",
    "vocabulary",
    "with_order",
]
