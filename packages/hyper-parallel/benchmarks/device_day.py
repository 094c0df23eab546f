"""The first day on a device: its tests, its streams and its figures, one after the other, whatever fails before.

    python packages/hyper-parallel/benchmarks/device_day.py [PART ...] [--backend torch-cuda] [--minutes 50] [--out DIR]

What is most likely to find a fault comes first, and a part that does not end in its minutes is ended. DIR gets the
whole output of each part, the tests' results as XML and a trace of a step; the end of the run prints how each part
ended, the tests that failed, and what the audit of streams found. On the simulated NPU, where it is rehearsed, figures
are those of the CPU. It needs nothing but the sources on the path and pytest:

    export PYTHONPATH=$(ls -d packages/*/src | paste -sd:)

Parts: device, what it is and which libraries are there; audit, the tests of packages that copy or communicate beside
the computation, with every two accesses compared that no stream, event or wait orders; tests, those that a device can
break; fsdp, a step of a billion parameters in bfloat16 beside FSDP2's, with a trace; dtensor, host overhead beside
torch's; grouped, products of experts; homes, parameters that visit the device; probe, the table of the hardware.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

from hp_testing.pools.target import AUDIT

ROOT = Path(__file__).parents[3]
MINUTES = {"device": 2, "audit": 12, "tests": 15, "fsdp": 6, "dtensor": 3, "grouped": 3, "homes": 3, "probe": 3}
AUDITED = ("hp-fsdp", "hp-offload", "hp-optim", "hp-pipeline", "hp-moe", "hp-testing")
# The audit keeps Dynamo from tracing, what torch's own fully_shard does is not ours to name, and one test writes to
# what is being sent.
UNAUDITED = "not compile and not graph and not torch and not explain and not while_it_is_sent"
_SHOWN = 15


def commands(backend: str, out: Path) -> dict[str, list[str]]:
    """Return the command of each part."""
    device = {"torch-cuda": "cuda", "torch-npu": "npu"}.get(backend, "cpu")
    pytest = [sys.executable, "-m", "pytest", "--backend", backend, "--tier", "device", "-q"]
    packages = sorted(f"packages/{path.name}" for path in ROOT.glob("packages/*"))
    benchmark = lambda package, name: [sys.executable, f"packages/{package}/benchmarks/{name}.py"]  # noqa: E731
    on_cpu = ["--device", "cpu", "--hidden", "128", "--layers", "4"] if device == "cpu" else []
    return {
        "device": [sys.executable, "-m", "hyper_parallel", "doctor"],
        "audit": [*pytest, *(f"packages/{name}" for name in AUDITED), "-k", UNAUDITED, f"--junitxml={out}/audit.xml"],
        "tests": [*pytest, *packages, f"--junitxml={out}/tests.xml"],
        "fsdp": [*benchmark("hp-fsdp", "bench_fsdp_device"), *on_cpu, "--trace", f"{out}/step.json"],
        "dtensor": [*benchmark("hp-dtensor", "bench_dtensor"), "--rounds", "6", "--device", device],
        "grouped": [*benchmark("hp-moe", "bench_moe"), "--parts", "grouped", "--device", device],
        "homes": benchmark("hp-offload", "bench_homes"),
        "probe": [sys.executable, "-m", "hyper_parallel", "probe", "--out", f"{out}/hardware.toml"],
    }


def failures(path: Path) -> list[str]:
    """List the tests that failed, by the results that pytest wrote, each with the last line of its error."""
    if not path.exists():
        return []
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        for error in (*case.findall("failure"), *case.findall("error")):
            lines = [line for line in (error.text or "").splitlines() if line.strip()]
            found.append(f"{case.get('classname')}::{case.get('name')}: {lines[-1].strip() if lines else ''}")
    return found


def faults(text: str) -> list[str]:
    """List what the audit found, each once: streams and addresses differ from run to run."""
    lines = re.findall(r"(?:nothing orders two accesses|memory is freed on stream).*", text)
    return sorted({re.sub(r"-?0x[0-9a-f]+", "N", line) for line in lines})


def shown(title: str, lines: Iterable[str]) -> None:
    """Print some lines and how many there are more."""
    listed = list(lines)
    if listed:
        print(f"\n{title}: {len(listed)}", *listed[:_SHOWN], sep="\n  ")
        if len(listed) > _SHOWN:
            print(f"  and {len(listed) - _SHOWN} more")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(MINUTES)}; default: all, in this order"
    )
    parser.add_argument("--backend", default="torch-cuda", help="of the tests: torch-cuda, torch-npu or torch-npu-sim")
    parser.add_argument("--minutes", type=float, default=50.0, help="of all parts together (default: 50)")
    parser.add_argument("--out", type=Path, default=Path("device-day"), help="folder of the results")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(MINUTES)
    if unknown:
        parser.error(f"there is no part {unknown.pop()!r}; there are {', '.join(MINUTES)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    out, begun, ended = arguments.out.resolve(), time.monotonic(), []
    kind = {"torch-cuda": "cuda", "torch-npu": "npu"}.get(arguments.backend, "cpu")
    for part, command in commands(arguments.backend, out).items():
        if arguments.parts and part not in arguments.parts:
            continue
        left = 60 * arguments.minutes - (time.monotonic() - begun)
        if left < 30:
            ended.append(f"{part}: not begun, no time is left")
            continue
        environment = {**os.environ, "HYPER_PARALLEL_DEVICE": kind, "HF_HUB_OFFLINE": "1"}
        environment |= {AUDIT: "1"} if part == "audit" else {}
        environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if kind == "cpu" else {}
        start, limit = time.monotonic(), min(60 * MINUTES[part], left)
        print(f"== {part}, {limit / 60:.0f} minutes at most: {' '.join(command)}", flush=True)
        with open(out / f"{part}.txt", "w", encoding="utf-8") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
            try:
                how = f"exit code {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                how = "ended at its limit"
        ended.append(f"{part}: {how} after {time.monotonic() - start:.0f} s")
        print("".join((out / f"{part}.txt").read_text(encoding="utf-8").splitlines(keepends=True)[-_SHOWN:]))
    shown("parts", ended)
    shown("tests that failed", (fault for name in ("audit", "tests") for fault in failures(out / f"{name}.xml")))
    audited = out / "audit.txt"
    shown("faults of streams", faults(audited.read_text(encoding="utf-8")) if audited.exists() else ())
    return int(any("exit code 0" not in each for each in ended))


if __name__ == "__main__":
    sys.exit(main())
