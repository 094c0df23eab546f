"""Context parallelism on MindSpore: of Cells that are passed q, k and v."""

from __future__ import annotations

from hp_styles.mindspore.context.hooks import attach, enclose
from hp_styles.mindspore.context.refused import attach_sparse, attention_over, cut_in_place
from hp_styles.mindspore.context.sequence import shard, unshard

__all__ = ["attach", "attach_sparse", "attention_over", "cut_in_place", "enclose", "shard", "unshard"]
