"""`hyper-parallel doctor`: what this machine has to train with, what is wrong with it, and what would add something."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement

from hp_platform import get_platform
from hp_platform.extend import PLATFORMS, SettingError, inside_launcher, share_bytes, usable_cores
from hyper_parallel.launching.ranks import run_ranks
from hyper_parallel.reports.run_metadata import versions

State = Literal["ok", "note", "fault"]
_PATIENCE = 120.0  # seconds for two ranks to start and to meet; a hang, not a slow machine
_SHARED = 1 << 30
_FILES = 4096
_EXTRAS = {
    "transformers": ("torch", "models by the names of their configurations"),
    "safetensors": ("torch", "checkpoints, and weights to start from"),
    "peft": ("peft", "adapters (LoRA)"),
    "tokenizers": ("data", "`hyper-parallel data prepare` with a model's tokenizer"),
    "pyarrow": ("data", "parquet files as data"),
    "matplotlib": ("train", "the picture of a run's loss"),
    "tensorboardX": ("tensorboard", "metrics for TensorBoard"),
    "wandb": ("wandb", "metrics for Weights & Biases"),
}
_VARIABLES = ("HYPER_PARALLEL_", "NCCL_", "HCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Finding:
    """What was found of one thing.

    Attributes:
        part: `"versions"`, `"devices"`, `"machine"`, `"ranks"`, `"extras"` or `"variables"`.
        name: of the thing.
        value: what was found.
        state: `"fault"` keeps ranks from training, `"note"` may in some cases.
        fix: what to do; empty where nothing is.
    """

    part: str
    name: str
    value: str
    state: State = "ok"
    fix: str = ""


def examine_machine(*, probe: bool = True) -> list[Finding]:
    """Look at the versions, the devices, the machine, its ranks and the optional libraries.

    Args:
        probe: start two ranks, or as many as there are accelerators if that is one, and let them communicate.
    """
    found = [*_versions()]
    installed = [name for name in PLATFORMS if importlib.util.find_spec(name) is not None]
    if not installed:
        extras = " or ".join(f"pip install 'hyper-parallel[{name}]'" for name in PLATFORMS)
        return [*found, Finding("versions", "framework", "none is installed", "fault", extras), *_machine()]
    try:
        devices = list(_devices())
    except (SettingError, ImportError) as error:
        devices = [Finding("devices", "kind", str(error), "fault", "correct the variable, or the installation")]
    found += [*devices, *_machine()]
    if probe and not any(each.state == "fault" for each in devices):
        found.append(_meeting())
    return [*found, *_extras(), *_variables()]


def reach() -> str:
    """Let ranks of this machine, new processes, communicate; get their number and the backend."""
    devices = get_platform().devices
    count = 2 if devices.kind == "cpu" else min(2, devices.count)
    backend = run_ranks(_greet, count)[0]
    return f"{count} rank{'s' if count > 1 else ''} over {backend}"


def _greet() -> str:
    """Hear of all other ranks; get the backend."""
    groups = get_platform().groups
    own = str(groups.rank()).encode()
    heard = share_bytes(own, groups.default_group())
    if heard != [str(rank).encode() for rank in range(groups.size())]:
        raise RuntimeError(f"ranks have received {heard} from each other")
    return str(groups.backend())


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info < (3, 11)
    yield Finding("versions", "python", python, "fault" if old else "ok", "take Python 3.11 or newer" if old else "")
    found, ranges = versions(), _ranges()
    own = {name: number for name, number in found.items() if name.startswith(("hp-", "hyper-parallel"))}
    each_its_own = ", ".join(f"{name} {number}" for name, number in own.items())
    value = each_its_own if len(set(own.values())) > 1 else "".join(set(own.values()))
    yield Finding("versions", "hyper-parallel", value or "a checkout that is not installed")
    for name, number in found.items():
        if name in own or name == "python":
            continue
        wanted = ranges.get(name)
        fits = wanted is None or wanted.specifier.contains(number, prereleases=True)
        fix = "" if fits else f"tested with {wanted}: pip install '{wanted}'"
        yield Finding("versions", name, number, "ok" if fits else "note", fix)


def _ranges() -> dict[str, Requirement]:
    """Return the versions of libraries that the distribution asks for."""
    try:
        listed = metadata.requires("hyper-parallel") or []
    except metadata.PackageNotFoundError:
        return {}
    wanted = [Requirement(each) for each in listed]
    return {each.name: Requirement(f"{each.name}{each.specifier}") for each in wanted if each.specifier}


def _devices() -> Iterator[Finding]:
    platform = get_platform()
    devices = platform.devices
    memory = devices.total_memory()
    size = "" if memory is None else f", {memory / 2**30:.0f} GiB" + ("" if devices.kind == "cpu" else " each")
    yield Finding("devices", "platform", platform.name)
    if devices.kind == "cpu":
        yield Finding("devices", "cpu", f"{devices.name()}, {usable_cores()} cores{size}")
        for kind, tool in (("NVIDIA GPU", "nvidia-smi"), ("Ascend NPU", "npu-smi")):
            if shutil.which(tool) is not None and "HYPER_PARALLEL_DEVICE" not in os.environ:
                fix = f"{platform.name} sees none: install its build for that device"
                yield Finding("devices", kind, f"{tool} is here, and {platform.name} uses the CPU", "note", fix)
        return
    yield Finding("devices", devices.kind, f"{devices.count} x {devices.name()}{size}")


def _machine() -> Iterator[Finding]:
    if os.path.isdir("/dev/shm"):
        shared = shutil.disk_usage("/dev/shm").free
        small = shared < _SHARED
        fix = "in a container, start it with --shm-size=8g or --ipc=host" if small else ""
        yield Finding("machine", "shared memory", f"{shared / 2**30:.1f} GiB", "note" if small else "ok", fix)
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < _FILES
    more = 65536 if hard < 0 else min(hard, 65536)
    fix = f"ulimit -n {more}" if more > files else "raise the hard limit (/etc/security/limits.conf)"
    fix = f"for many ranks or data workers: {fix}" if few else ""
    yield Finding("machine", "open files", str(files), "note" if few else "ok", fix)
    try:
        value, fix = f"{socket.gethostname()} is {socket.gethostbyname(socket.gethostname())}", ""
    except OSError:
        value = f"{socket.gethostname()} has no address"
        fix = "add it to /etc/hosts, or name an interface: GLOO_SOCKET_IFNAME=lo, for ranks of one machine"
    yield Finding("machine", "host name", value, "note" if fix else "ok", fix)


def _meeting() -> Finding:
    """Let ranks meet, in a process that can be ended."""
    if inside_launcher():
        return Finding("ranks", "communication", "not tried: this process is a launcher's rank", "note")
    program = "from hyper_parallel.commands.doctor import reach; print(reach())"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        fix = "look at the interfaces: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO, a firewall"
        return Finding("ranks", "communication", f"ranks did not meet in {_PATIENCE:g} s", "fault", fix)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Finding("ranks", "communication", f"ranks fail: {reason}", "fault", "correct what the error says")
    return Finding("ranks", "communication", done.stdout.strip().splitlines()[-1])


def _extras() -> Iterator[Finding]:
    here = [name for name in _EXTRAS if importlib.util.find_spec(name) is not None]
    yield Finding("extras", "here", ", ".join(here) or "none")
    for name, (extra, adds) in _EXTRAS.items():
        if name not in here:
            package = name if extra is None else f"'hyper-parallel[{extra}]'"
            yield Finding("extras", name, f"would add {adds}", "ok", f"pip install {package}")


def _variables() -> Iterator[Finding]:
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES):
            yield Finding("variables", name, os.environ[name])
