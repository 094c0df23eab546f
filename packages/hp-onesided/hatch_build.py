"""Builds a wheel with the compiled core, for one platform, where HYPER_PARALLEL_BUILD_CORE=1 asks for it.

Else the wheel is pure, and the core is compiled at first use. `CXX` names another compiler, such as
aarch64-linux-gnu-g++, whose wheel is for its machine.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# So that the machine needs no C++ library, and of the C library the version that the wheel names.
ALONE = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-s")


class CoreBuildHook(BuildHookInterface):
    """Adds the core to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the core, and name the platform."""
        if os.environ.get("HYPER_PARALLEL_BUILD_CORE") != "1" or version == "editable":
            return
        library = runpy.run_path(str(Path(self.root, "src/hp_onesided/cores/library.py")))
        compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, library["COMPILERS"])), None)
        if compiler is None:
            raise OSError(f"HYPER_PARALLEL_BUILD_CORE=1 needs a C++ compiler: one of {library['COMPILERS']}, or CXX")
        self._folder = tempfile.TemporaryDirectory()
        made = Path(self._folder.name, "libcore.so")
        library["compile_core"](compiler, made, *ALONE)
        build_data["force_include"][str(made)] = "hp_onesided/cores/libcore.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(compiler, made)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def platform_of(compiler: str, library: Path) -> str:
    """Name the platform of PEP 600: the compiler's machine, and the least C library with all of the core's symbols."""
    target = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    minors = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes())]
    return f"manylinux_2_{max(minors)}_{target.partition('-')[0]}"
