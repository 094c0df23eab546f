"""Draw docs/pipeline.svg, a picture that the README of hp-pipeline names: ZBV with eight micro-batches on four ranks.

PYTHONPATH=packages/hp-pipeline/src:packages/hp-platform/src python docs/pipeline_picture.py
"""

from __future__ import annotations

from pathlib import Path

from hp_pipeline import Pipeline, placed, schedules, simulate
from hp_pipeline.orders.simulation import to_svg


def main() -> None:
    """Write the picture."""
    pipeline = Pipeline(placed("v", 4), 8)
    Path(__file__).with_name("pipeline.svg").write_text(to_svg(simulate(schedules.zbv(pipeline), pipeline)))


if __name__ == "__main__":
    main()
