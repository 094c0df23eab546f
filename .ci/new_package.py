"""Make a package: `python .ci/new_package.py hp-example`; `nox -s new-package -- hp-example` runs it.

The package has an engine, its port, both frameworks' implementations and tests that run with each; all of it is to be
replaced. The lists that name every package (pyproject.toml, docs/features.toml) get it as well.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "hp-styles"
"""The package whose pyproject.toml is adapted, and beside which the new one stands in the layers."""

FILES = {
    "README.md": """\
# {name}

TODO: what it is for, in a sentence.

    pip install '{name}[torch]'      # or '{name}[mindspore]'

```python fragment
from {module} import rank_mean

mean = rank_mean(tensor)  # over all ranks; the tensor stays as it was
```
""",
    "CHANGELOG.md": "# Changelog\n\n## 0.1.0 (unreleased)\n\n- `rank_mean`: the mean of a tensor over all ranks.\n",
    "src/{module}/py.typed": "",
    "src/{module}/__init__.py": '''\
"""TODO: what the package is for, in a sentence."""

from {module}.engine import rank_mean

__all__ = ["rank_mean"]
''',
    "src/{module}/engine.py": '''\
"""What the package does, in terms of its port: no framework is imported here."""

from __future__ import annotations

from typing import Any

from hp_platform import get_platform
from {module}.port import port


def rank_mean(tensor: Any) -> Any:
    """Average a tensor over all ranks.

    Args:
        tensor: floating-point, of the same shape and dtype on every rank; it is not changed.

    Raises:
        TypeError: the tensor is not floating-point.
    """
    if not port().is_floating(tensor):
        raise TypeError(f"rank_mean takes a floating-point tensor, got {{tensor.dtype}}; convert it before the call.")
    groups, collectives = get_platform().groups, get_platform().collectives
    total = port().copy(tensor)
    collectives.all_reduce(total, group=groups.new_group(range(groups.size())))
    return total / groups.size()
''',
    "src/{module}/port.py": '''\
"""What a framework supplies to {name}."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from hp_platform.extend import load_port


class Port(Protocol):
    """Tensors; `<framework>/port.py`."""

    def is_floating(self, tensor: Any) -> bool:
        """Tell whether the tensor's dtype is floating-point."""
        ...

    def copy(self, tensor: Any) -> Any:
        """Copy a tensor's values to one of its own memory, without its history."""
        ...


@functools.cache
def port() -> Port:
    """Get what the framework in use supplies."""
    return load_port(Port)
''',
    "src/{module}/torch/__init__.py": '"""The PyTorch side of {name}."""\n',
    "src/{module}/torch/port.py": '''\
"""Tensors of PyTorch."""

from __future__ import annotations

import torch


def is_floating(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's dtype is floating-point."""
    return tensor.is_floating_point()


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor's values to one of its own memory, without its history."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
''',
    "src/{module}/mindspore/__init__.py": '"""The MindSpore side of {name}."""\n',
    "src/{module}/mindspore/port.py": '''\
"""Tensors of MindSpore."""

from __future__ import annotations

from mindspore import Tensor, ops


def is_floating(tensor: Tensor) -> bool:
    """Tell whether the tensor's dtype is floating-point."""
    return tensor.is_floating_point()


def copy(tensor: Tensor) -> Tensor:
    """Copy a tensor's values to one of its own memory, without its history."""
    return ops.stop_gradient(tensor).copy()
''',
    "tests/test_port.py": '''\
"""The port of the framework in use has what {module}.port declares."""

from __future__ import annotations

from hp_testing.conformance import mismatches
from {module}.port import Port, port


def test_port():
    assert mismatches(Port, port()) == []
''',
    "tests/test_engine.py": """\
from __future__ import annotations

import numpy as np
import pytest

from hp_platform import get_platform
from hp_testing import as_array, as_tensor, on_ranks
from {module} import rank_mean


@on_ranks(1, 2)
def test_the_mean_over_ranks(ranks):
    own = np.arange(3.0) + get_platform().groups.rank()
    tensor = as_tensor(own, "float32")
    assert as_array(rank_mean(tensor)).tolist() == (np.arange(3.0) + (ranks - 1) / 2).tolist()
    assert as_array(tensor).tolist() == own.tolist()


@on_ranks(1)
def test_integers_are_refused():
    with pytest.raises(TypeError, match="rank_mean takes a floating-point tensor, got .*[Ii]nt.*; convert it"):
        rank_mean(as_tensor(np.arange(3)))
""",
}


def make(root: Path, name: str) -> None:
    """Write the package's folder and enter it in the lists of the root.

    Args:
        root: of the repository.
        name: of the distribution, such as "hp-example".

    Raises:
        SystemExit: the name is no package's, or taken.
    """
    folder, module = root / "packages" / name, name.replace("-", "_")
    if not re.fullmatch(r"hp(-[a-z]+)+", name) or folder.exists():
        sys.exit(f"a package is named hp-<words in small letters>, and new; got {name!r}")
    for path, text in FILES.items():
        target = folder / path.format(module=module)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.format(name=name, module=module), "utf-8")
    shutil.copy(root / "LICENSE", folder / "LICENSE")
    project = (root / "packages" / MODEL / "pyproject.toml").read_text("utf-8")
    project = project.replace(MODEL, name).replace(MODEL.replace("-", "_"), module)
    project = re.sub(r"(?m)^description = .*$", 'description = "TODO: what it is for"', project)
    project = re.sub(r"(?m)^dependencies = .*$", 'dependencies = ["hp-platform~=0.1.0"]', project)
    project = re.sub(r"(?m)^test = .*$", 'test = ["hp-testing~=0.1.0"]', project)
    (folder / "pyproject.toml").write_text(project, "utf-8")
    enter(root / "pyproject.toml", pyproject_entries(name, module))
    feature = f'[[feature]]\npackage = "{name}"\nname = "mean over ranks"\ntests = ["{name}/tests/test_engine.py"]\n\n'
    lines = {f"{MODEL} = [": f"{name} = [3, 1, 5]\n", "# ---- hyper-parallel\n": f"# ---- {name}\n\n{feature}"}
    enter(root / "docs/features.toml", lines)


def pyproject_entries(name: str, module: str) -> dict[str, str]:
    """Get what the root's pyproject.toml gets before which text."""
    package, source = MODEL.replace("-", "_"), f"packages/{MODEL}/src"
    environment = f'    {{ root = "packages/{name}/src/{module}/mindspore", reportMissingImports = false }},\n'
    return {
        f"{MODEL} = {{": f"{name} = {{ workspace = true }}\n",
        f'    "{source}",': f'    "packages/{name}/src",\n',
        f'    {{ root = "{source}/': environment,
        f'"{package}", "hp_fsdp", "hp_plan", "hyper_parallel"]': f'"{module}", ',
        f'{package}", "hp_dtensor", "hp_testing", "hp_platform"]': f"{module} | ",
    }


def enter(path: Path, entries: dict[str, str]) -> None:
    """Put texts into a file, each before the one place where its key stands."""
    text = path.read_text("utf-8")
    for before, added in entries.items():
        if text.count(before) != 1:
            sys.exit(f"{path}: {before!r} stands {text.count(before)} times, expected once; enter {added!r} by hand")
        text = text.replace(before, added + before)
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    make(ROOT, sys.argv[1])
