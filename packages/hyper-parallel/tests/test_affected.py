"""Which packages' tests `nox -s affected` runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it"),
]

ROOT = Path(__file__).resolve().parents[3]
NEEDS = {"hp-low": {"hp-kit"}, "hp-kit": {"hp-low"}, "hp-a": {"hp-low", "hp-kit"}, "hp-b": {"hp-low"}}
NEEDS["hyper-parallel"] = {"hp-a", "hp-b"}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("affected", ROOT / ".ci/affected.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([], []),
        (["packages/hp-a/src/hp_a/x.py"], ["hp-a", "hyper-parallel"]),
        (["packages/hp-a/pyproject.toml", "packages/hp-b/README.md"], ["hp-a", "hp-b", "hyper-parallel"]),
        (["packages/hp-low/src/hp_low/torch/x.py"], sorted(NEEDS)),
        (["packages/hp-a/tests/test_x.py"], ["hp-a"]),
        (["packages/hp-low/tests/torch/test_x.py", "packages/hp-b/benchmarks/b.py"], ["hp-b", "hp-low"]),
        (["packages/hp-low/CHANGELOG.md", "packages/hp-low/api.txt", "docs/design.md", ".gitignore"], []),
        (["docs/structure.py"], ["hyper-parallel"]),
        (
            ["docs/features.toml", "examples/a.toml", "programs/gan.py", ".ci/affected.py", "README.md"],
            ["hyper-parallel"],
        ),
        (["noxfile.py"], sorted(NEEDS)),
        (["pyproject.toml"], sorted(NEEDS)),
        (["constraints-torch.txt"], sorted(NEEDS)),
        (["conftest.py", "packages/hp-a/tests/test_x.py"], sorted(NEEDS)),
        (["packages/hp-gone/src/hp_gone/x.py"], sorted(NEEDS)),
        (["somewhere/else.py"], sorted(NEEDS)),
    ],
)
def test_the_packages_of_changed_files(script, changed, expected):
    assert script.affected(changed, NEEDS) == expected


def test_what_depends_on_what_is_read_from_the_packages(script):
    needs = script.read_needs(ROOT)
    assert needs["hp-styles"] == {"hp-dtensor", "hp-onesided", "hp-platform", "hp-testing"}
    for one, other in (("hp-styles", "hp-fsdp"), ("hp-fsdp", "hp-styles")):
        above = script.above(one, needs)
        assert {one, "hp-plan", "hyper-parallel"} <= above
        assert not {other, "hp-dtensor", "hp-platform"} & above
    for lowest in ("hp-platform", "hp-testing"):
        assert script.above(lowest, needs) == {*needs}
