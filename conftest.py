"""Makes a checkout testable without installing it: `python -m pytest packages/hp-dtensor --backend torch-cuda`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import tomllib
from pathlib import Path

# Where packages are installed, exactly those are tested, so that a dependency that one of them forgot to name shows.
if importlib.util.find_spec("hp_platform") is None:
    _sources = [str(path) for path in sorted(Path(__file__).parent.glob("packages/*/src"))]
    sys.path[:0] = _sources
    # Child processes (ranks, command lines under test) need the same.
    os.environ["PYTHONPATH"] = os.pathsep.join([*_sources, *filter(None, [os.environ.get("PYTHONPATH")])])

# What an installation would have beside it: the names by which hp-platform finds a package that it doesn't import.
if importlib.util.find_spec("hp_onesided") and not importlib.metadata.entry_points(group="hp_platform.carriers"):
    _metadata = tempfile.TemporaryDirectory(prefix="hp-onesided-")
    _project = tomllib.loads(Path(__file__).with_name("packages").joinpath("hp-onesided/pyproject.toml").read_text())
    _folder = Path(_metadata.name, "hp_onesided-0.dist-info")
    _folder.mkdir()
    _folder.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: hp-onesided\nVersion: 0\n")
    _lines = [
        f"{name} = {where}" for name, where in _project["project"]["entry-points"]["hp_platform.carriers"].items()
    ]
    _folder.joinpath("entry_points.txt").write_text("\n".join(["[hp_platform.carriers]", *_lines]))
    sys.path.append(_metadata.name)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), _metadata.name])

pytest_plugins = ["hp_testing.plugin"]
