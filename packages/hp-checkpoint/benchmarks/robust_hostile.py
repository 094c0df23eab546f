"""10,000 mutated checkpoints of every format: each loads, or is refused by name, within 1 GiB and 10 s.

Bytes and instructions are changed in manifests with the right hashes, files of torch.distributed.checkpoint and
torch.save, headers of safetensors, indices of the hub, files of MindSpore: numbers that are huge or negative, lists in
themselves and in others 2**40 times, keys twice, names of code. Each is loaded twice, over different values, which have
to end the same, and goes through two of the other functions: complete states, models, inspect, verify, diff, convert.
A child does it, of which another one takes the place if it dies. CPU time and peak of the memory are measured for each.

    robust_hostile.py                       # the complete figures
    robust_hostile.py --only dcp:17         # one again, with what it says
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import damaged_formats
import torch

from hp_checkpoint import CheckpointError, InvalidCheckpointError, load, load_checkpoint, load_model
from hp_checkpoint.disk.tools import diff, faults, summary
from hp_checkpoint.formats.dcp_export import to_dcp
from hp_checkpoint.formats.hugging_face import to_hugging_face
from hp_checkpoint.loading.loading import open_source
from hp_checkpoint.port import port

CPU, MEMORY = 10.0, 1 << 30
_OURS = (CheckpointError, InvalidCheckpointError)
_RAW = re.compile(r"failed: (?!InvalidCheckpointError)[A-Z]\w*(Error|Exception): ")


def main() -> None:
    """Mutate and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--only")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as base:
        whole = {kind: damaged_formats.write(kind, Path(base) / "whole") for kind in damaged_formats.FORMATS}
        if options.only:
            kind, number = options.only.split(":")
            print(json.dumps(examine(kind, int(number), whole, Path(base)), indent=1))
            return
        jobs = [(kind, n) for n in range(-(-options.mutants // len(whole))) for kind in whole][: options.mutants]
        results = run(jobs, lambda job: examine(*job, whole, Path(base)))
    bad = [each for each in results if each["fault"]]
    for kind in damaged_formats.FORMATS:
        own = [each for each in results if each["kind"] == kind]
        counts = Counter(each["outcome"] for each in own)
        print(f"{kind}: {dict(sorted(counts.items()))}")
    if results:
        print(
            f"{len(results):,} mutants, {len(bad)} faults; at most {max(each['cpu'] for each in results):.2f} s of CPU"
            f" time and {max(each['mib'] for each in results):.0f} MiB"
        )
    sys.exit(bool(bad))


def run(jobs: list[Any], action: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """Run an action for each job in a child; one that dies is the fault of its job."""
    results: list[dict[str, Any]] = []
    while len(results) < len(jobs):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            try:
                _serve(jobs[len(results) :], action, write)
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
                os._exit(1)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                results.append(json.loads(line))
                if results[-1]["fault"]:
                    print(f"{results[-1]['kind']}:{results[-1]['number']}: {results[-1]['fault']}", flush=True)
        status = os.waitpid(child, 0)[1]
        if len(results) < len(jobs):
            kind, number = jobs[len(results)]
            fault = f"the process ended with {status}" + " (CPU time)" * (status == signal.SIGXCPU)
            print(f"{kind}:{number}: {fault}", flush=True)
            results.append({"kind": kind, "number": number, "outcome": "died", "fault": fault, "cpu": CPU, "mib": 0.0})
    return results


def _serve(jobs: list[Any], action: Callable[[Any], dict[str, Any]], write: int) -> None:
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + 4 * MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stderr = open(os.devnull, "w")
    for job in jobs:
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + CPU) + 2, resource.RLIM_INFINITY))
        os.write(write, (json.dumps(action(job)) + "\n").encode())


def _status(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) << 10 if match else 0


def examine(kind: str, number: int, whole: dict[str, Path], base: Path) -> dict[str, Any]:
    """Make a mutant and do all with it."""
    choice = random.Random(f"{kind} {number}")
    target = base / "mutant" / (whole[kind].name if whole[kind].is_file() else kind)
    resealed = damaged_formats.mutate(kind, whole[kind], target, choice)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, used = _status("VmRSS"), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    said: list[str] = []
    outcome, fault = "", ""
    actions = _actions(kind, target, whole[kind], base)
    others = choice.sample(sorted(actions.keys() - {"load"}), min(2, len(actions) - 1))
    for name in ("load", *others):
        action = actions[name]
        try:
            result = action()
            text = result if isinstance(result, str) else ""
        except Exception as error:
            text = _judged(error, target)
        if name == "load":
            outcome = "named" if text.startswith("named") else text
        if text.startswith("!") or text == "other" and kind in damaged_formats.SEALED and not resealed:
            fault = fault or f"{name}: {text[:600]}"
        said.append(f"{name}: {text[:400]}")
    cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - used
    peak = max(0, _status("VmHWM") - before)
    if cpu > CPU or peak > MEMORY:
        fault = fault or f"{cpu:.1f} s, {peak >> 20} MiB"
    shutil.rmtree(base / "mutant", ignore_errors=True)
    shutil.rmtree(base / "converted", ignore_errors=True)
    record = {"kind": kind, "number": number, "outcome": outcome.split(":")[0], "fault": fault}
    return {**record, "cpu": cpu, "mib": peak / 2**20, "said": said}


def _judged(error: Exception, target: Path) -> str:
    """Return "named" for an error that says what is wrong where, else a text that begins with "!"."""
    text = str(error)
    ours = isinstance(error, (*_OURS, FileNotFoundError)) or (
        isinstance(error, (ValueError, TypeError)) and text.startswith(("load: ", "checkpoint: "))
    )
    names = str(target) in text or target.name in text or text.startswith(("load: ", "checkpoint: "))
    if ours and names and len(text) < 5000 and not _RAW.search(text):
        return f"named: {text[:300]}"
    return f"!{type(error).__name__}: {text[:500]}"


def _actions(kind: str, target: Path, whole: Path, base: Path) -> dict[str, Callable[[], Any]]:
    converted = base / "converted"
    if target.suffix:
        return {"load": lambda: _file(target), "convert": lambda: to_hugging_face(target, converted / "hf")}
    actions: dict[str, Callable[[], Any]] = {
        "load": lambda: _twice(target, kind),
        "load_checkpoint": lambda: _filled(target),
        "load_model": lambda: _model(target),
        "inspect": lambda: json.dumps(summary(target)) and "",
        "diff": lambda: diff(whole, target) and "",
        "convert": lambda: to_hugging_face(target, converted / "hf") and "",
    }
    if kind in damaged_formats.SEALED:
        actions["verify"] = lambda: faults(target) and ""
    if kind != "dcp":
        actions["to dcp"] = lambda: to_dcp(target, converted / "dcp") and ""
    return actions


def _zeros(value: Any, fill: float) -> Any:
    if isinstance(value, dict):
        return {key: _zeros(each, fill) for key, each in value.items()}
    if isinstance(value, list):
        return [_zeros(each, fill) for each in value]
    return torch.full_like(value, fill) if isinstance(value, torch.Tensor) else None


def _template(kind: str, fill: float) -> dict[str, Any]:
    state = damaged_formats.state()
    return _zeros(state if kind in (*damaged_formats.SEALED, "dcp") else {"model": state["model"]}, fill)


def _twice(target: Path, kind: str) -> str:
    states = [_template(kind, fill) for fill in (7.0, 9.0)]
    for state in states:
        load(state, checkpoint_id=target, no_dist=True)
    if not _equal(*states):
        return "!a tensor was not loaded, and nothing was said"
    truth = damaged_formats.state()
    return "same" if _equal(states[0], {key: truth[key] for key in states[0]}) else "other"


def _filled(target: Path) -> str:
    """Load what there is over two values of new memory."""
    own = port().empty

    def loaded(fill: int) -> Any:
        port().empty = lambda dtype, shape: own(dtype, shape).fill_(fill)  # type: ignore[method-assign]
        return load_checkpoint(target)

    try:
        states = loaded(7), loaded(9)
    finally:
        port().empty = own  # type: ignore[method-assign]
    return "" if _equal(*states) else "!load_checkpoint returned memory as it was"


def _model(target: Path) -> str:
    model = torch.nn.Module()
    for name, array in damaged_formats.tensors().items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(array.shape)))
    load_model(model, target)
    return ""


def _file(target: Path) -> str:
    manifest, _, state = open_source(target)
    copy = target.parent / "dcp"
    to_dcp(target, copy)
    found = load_checkpoint(copy)
    shutil.rmtree(copy)
    own = {name: torch.from_numpy(array) for name, array in damaged_formats.tensors().items()}
    truth = own if state is None else damaged_formats.state()
    same = all(key in found and _equal(_texts(found[key]), _texts(value)) for key, value in truth.items())
    return "same" if same else "other"


def _texts(value: Any) -> Any:
    """Return a state whose keys are texts, as torch.distributed.checkpoint has them."""
    return {str(key): _texts(each) for key, each in value.items()} if isinstance(value, dict) else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
    return type(one) is type(other) and (one == other or one != one)


if __name__ == "__main__":
    main()
