"""`hyper-parallel doctor`: what it finds on this machine, and on one that lacks something."""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import socket
import subprocess
from collections import namedtuple
from importlib import metadata
from typing import Any

import pytest
from typer.testing import CliRunner

from hp_platform import get_platform
from hp_platform.platforms.ports import choose_kind
from hyper_parallel.commands import cli, doctor
from hyper_parallel.commands.doctor import Finding, examine_machine

pytestmark = pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MS_ROLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "cpu")
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", get_platform().name)
    monkeypatch.setenv("COLUMNS", "80")


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in found}


def test_this_machine_can_train():
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    found = {each["name"]: each for each in report["findings"]}
    assert report["faults"] == 0
    assert found["communication"]["value"].startswith("2 ranks over ")
    assert found[get_platform().name]["value"] == metadata.version(get_platform().name)
    assert found["HYPER_PARALLEL_DEVICE"]["value"] == "cpu"


def test_it_fits_on_a_screen():
    result = CliRunner().invoke(cli.app, ["doctor", "--no-probe"])
    lines = result.stdout.rstrip().splitlines()
    assert result.exit_code == 0 and len(lines) <= 40 and max(map(len, lines)) <= 80, result.stdout
    assert all(part in result.stdout for part in ("versions", "devices", "machine", "extras", "variables"))


def test_what_is_short_is_told_with_what_to_do(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: (_ for _ in ()).throw(OSError("unknown")))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("peft", "wandb") else True)
    found = by_name(examine_machine(probe=False))
    assert found["shared memory"] == Finding(
        "machine", "shared memory", "0.1 GiB", "note", "in a container, start it with --shm-size=8g or --ipc=host"
    )
    assert found["open files"].fix == "for many ranks or data workers: raise the hard limit (/etc/security/limits.conf)"
    assert found["host name"].state == "note" and "GLOO_SOCKET_IFNAME=lo" in found["host name"].fix
    assert (found["peft"].fix, found["wandb"].fix) == tuple(
        f"pip install 'hyper-parallel[{name}]'" for name in ("peft", "wandb")
    )
    monkeypatch.undo()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        fix = by_name(examine_machine(probe=False))["open files"].fix
        command = fix.removeprefix("for many ranks or data workers: ")
        done = subprocess.run(["sh", "-c", f"{command} && ulimit -n"], capture_output=True, text=True, check=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert done.stdout.strip() == command.split()[-1] == str(65536 if hard < 0 else min(hard, 65536))


@pytest.mark.parametrize(
    ("error", "output", "value"),
    [
        (subprocess.TimeoutExpired("python", 120), None, "ranks did not meet in 120 s"),
        (None, subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no route"), "RuntimeError: no route"),
    ],
)
def test_ranks_that_do_not_meet_are_a_fault(monkeypatch, error, output, value):
    def run(*args: Any, **kwargs: Any) -> Any:
        if error is not None:
            raise error
        return output

    monkeypatch.setattr(doctor.subprocess, "run", run)
    monkeypatch.setattr(doctor, "versions", dict)
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    faults = [each for each in json.loads(result.stdout)["findings"] if each["state"] == "fault"]
    assert result.exit_code == 1 and len(faults) == 1 and value in faults[0]["value"] and faults[0]["fix"]


def test_a_device_that_is_not_there_is_a_fault(monkeypatch):
    devices = type(get_platform().devices)
    monkeypatch.setattr(devices, "_kind", property(lambda self: choose_kind(self.present, "torch 2")))
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "gpu")
    found = [each for each in examine_machine(probe=True) if each.state == "fault"]
    assert [(each.name, each.fix) for each in found] == [("kind", "correct the variable, or the installation")]
    assert "Choose one of: cpu, " in found[0].value
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "cpu")
    assert not [each for each in examine_machine(probe=False) if each.state == "fault"]
