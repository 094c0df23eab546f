"""Runs that are disturbed at a chosen moment: a model that injects a fault into its rank, and a launcher of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from command_process import CommandProcess, program

# Written beside the plans: each rank imports it to build its model.
MODEL = '''
import ctypes, json, os, signal, time, zlib
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "tie_word_embeddings": True,
}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def model(log="", injection="", experts=False, **sizes):
    rank = os.environ.get("RANK")  # None in the launcher, which looks at the model beforehand
    if log and rank is not None:
        log_samples(f"{log}-{rank}.jsonl")
    if injection and rank is not None:
        fault = json.loads(injection)
        if fault["moment"] == "group":
            make_group_late(int(rank), **fault)
        elif fault["rank"] in (int(rank), -1):
            Injection(**fault)
    if experts:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, **sizes))
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **sizes}))


calls = 0


def killing_loss(model, batch):
    """The loss of a model that is declared by its configuration; it kills the rank of fault.json in its step, once."""
    global calls
    calls += 1
    if os.path.exists("fault.json"):
        fault = json.load(open("fault.json"))
        if str(fault["rank"]) == os.environ["RANK"] and calls == fault["step"] and not os.path.exists(fault["mark"]):
            with open(fault["mark"], "w") as file:
                file.write(json.dumps({"at": time.time(), "pid": os.getpid()}) + "\\n")
            os.kill(os.getpid(), signal.SIGKILL)
    logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def log_samples(path):
    """Note which global samples this rank is given in each step, and what they hold."""
    from hyper_parallel.data.samples import Batches

    if getattr(Batches, "logged", False):  # the process builds its model once more
        return
    take, Batches.logged = Batches.take, True

    def logged(self, sample):
        batch = take(self, sample)
        digests = [zlib.crc32(row.tobytes()) for row in batch.rows.tokens]
        with open(path, "a") as file:
            file.write(json.dumps([sample + self._rows.start, digests]) + "\\n")
        return batch

    Batches.take = logged


def make_group_late(own, rank, step, mark, **_):
    """Let a rank and its neighbour make a group of their own in a step, before which the first of them is killed."""
    from hp_platform import get_platform
    from hyper_parallel.data.samples import Batches

    if getattr(Batches, "grouped", False) or os.path.exists(mark):
        return
    take, Batches.grouped, now = Batches.take, True, [0]

    def taken(self, sample):
        now[0] += 1
        if now[0] == step and own == rank:
            with open(mark, "a") as file:
                file.write(json.dumps({"at": time.time(), "pid": os.getpid()}) + "\\n")
            os.kill(os.getpid(), signal.SIGKILL)
        elif now[0] == step and own == rank + 1:
            get_platform().groups.new_group([rank, own])
        return take(self, sample)

    Batches.take = taken


def flipped(module, inputs, output):
    """Return the output of a product with one bit flipped."""
    if not isinstance(module, torch.nn.Linear):
        return None
    wrong = output.clone()
    wrong.detach().view(-1).view(torch.int32)[3] ^= 1 << 20
    return wrong


class Injection:
    """A fault at the count-th event of a kind, in a step of this process or in a save or a load."""

    def __init__(self, rank, moment, how, step, count, launcher, mark, times=1):
        marks = open(mark).readlines() if os.path.exists(mark) else []
        if len(marks) >= times:
            return  # the process that is in the place of the lost one
        step = 1 if marks else step
        self.moment, self.how, self.step, self.count = moment, how, step, count
        self.launcher, self.mark, self.now, self.inside = launcher, mark, 0, ""
        if moment == "rebuild":
            self.moment = "backward"
            if marks:
                self.act()
        self._watch()

    def _watch(self):
        from hp_checkpoint import Checkpointer
        from hp_checkpoint.saving import copies
        from hp_platform.extend import observers
        from hyper_parallel.data.samples import Batches
        from hyper_parallel.torch.trainer import Trainer

        take, backward, copied, evaluate = Batches.take, torch.autograd.backward, copies._copied, Trainer.evaluate

        def taken(batches, sample):
            self.now += 1
            self.event("data", last=True)
            return take(batches, sample)

        def differentiated(tensors, *args, **options):
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda gradients: self.event("backward", last=True))
            return backward(tensors, *args, **options)

        def evaluated(trainer, rows):
            self.event("evaluation")
            return evaluate(trainer, rows)

        def copies_one(*args):
            self.event("copy")
            return copied(*args)

        def around(name, moment):
            original = getattr(Checkpointer, name)

            def called(*args, **options):
                self.inside = moment
                try:
                    result = original(*args, **options)
                    if self.now >= self.step - 1 or moment == "load":
                        self.event(moment, last=True)
                finally:
                    self.inside = ""
                if moment == "save":
                    self.event("writing", last=True)
                return result

            setattr(Checkpointer, name, called)

        def observed(kind, size, group):
            self.event(self.inside or "collective")

        Batches.take, torch.autograd.backward, copies._copied = taken, differentiated, copies_one
        Trainer.evaluate = evaluated
        around("save", "save")
        around("load", "load")
        observers.append(observed)
        torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: self.event("forward"))
        register_optimizer_step_pre_hook(lambda *_: self.event("before the update", last=True))
        register_optimizer_step_post_hook(lambda *_: self.event("optimizer", last=True))

    def event(self, moment, last=False):
        if moment != self.moment or moment != "load" and self.now < self.step:
            return
        self.count -= 1
        if self.count < 0 or last or self.now > self.step:
            self.moment = ""  # once
            self.act()

    def act(self):
        with open(self.mark, "a") as file:
            file.write(json.dumps({"at": time.time(), "pid": os.getpid()}) + "\\n")
        if self.how == "sigterm":
            os.kill(self.launcher, signal.SIGTERM)
        elif self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "raise":
            raise RuntimeError("a fault was injected")
        elif self.how == "exit":
            os._exit(7)
        elif self.how == "flip":
            torch.nn.modules.module.register_module_forward_hook(flipped)
        elif self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "loop":
            while True:
                pass
        elif self.how == "keep":
            ctypes.PyDLL(None).sleep(100000)  # in C, without letting go of the interpreter
'''
LAUNCHER = program("""
modules = ["hyper_parallel.worker", "hyper_parallel.torch.trainer", "torch._dynamo", "transformers.masking_utils"]
modules.append("hyper_parallel.launching.member")
multiprocessing.set_forkserver_preload([*modules, "transformers.models.qwen3.modeling_qwen3"])
multiprocessing.forkserver.ensure_running()
""")


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, and when.

    Attributes:
        rank: which; -1: every rank.
        moment: "data", "forward", "collective", "backward", "before the update", "optimizer" (in the update), "copy"
            (while a step is copied), "rebuild" (in the backward, and where the next epoch builds its model), "save",
            "writing" (when a save has begun in the background), "load", "evaluation", or "group" (where a neighbour
            waits for it to make a group of both).
        how: "sigterm" (to the launcher), "kill" (SIGKILL), "raise", "exit" (`os._exit`), "stop" (SIGSTOP), "loop",
            "keep" (in C, with the interpreter), or "flip": from then on each product of the process has a wrong bit.
        step: of the process, from 1 on.
        count: so many events of the kind pass before.
        times: it comes again, so often in all, in the first step of a process that takes the place of one that had it.
    """

    rank: int
    moment: str
    how: str
    step: int
    count: int = 0
    times: int = 1


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: its exit status.
        out: what it wrote to stdout.
        err: to stderr.
        at: when, in seconds since the epoch.
    """

    status: int
    out: str
    err: str
    at: float


class Launcher:
    """A process that runs the command once for each call, with its libraries loaded once.

    Args:
        folder: where it runs; the model and plans are written there.
        limit: seconds that a command may take.
    """

    def __init__(self, folder: Path, limit: float = 300.0) -> None:
        self.folder, self._limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "injected.py").write_text(MODEL, encoding="utf-8")
        environment = {**os.environ, "HYPER_PARALLEL_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._commands = CommandProcess(self.process, folder)

    def train(self, plan: str, run: str, *options: str, fault: Fault | None = None, log: bool = False) -> Ended:
        """Run `hyper-parallel train`.

        Args:
            plan: as TOML.
            run: the folder of the run, inside this one's.
            *options: of the command.
            fault: to inject.
            log: note the samples of each rank, in ``RUN-samples-RANK.jsonl``.
        """
        (self.folder / f"{run}.toml").write_text(plan, encoding="utf-8")
        for path in (self.mark(run), self.folder / "fault.json"):
            path.unlink(missing_ok=True)
        given: dict[str, str] = {}
        if log:
            given["log"] = str(self.folder / f"{run}-samples")
        if fault is not None:
            told: dict[str, Any] = {**asdict(fault), "launcher": self.process.pid, "mark": str(self.mark(run))}
            given["injection"] = json.dumps(told)
            (self.folder / "fault.json").write_text(given["injection"], encoding="utf-8")
        if "killing_loss" in plan:
            given.clear()
        texts = [
            item for name, text in given.items() for item in ("--set", f"model.overrides.{name}={json.dumps(text)}")
        ]
        return self.run("train", f"{run}.toml", "--out", run, "--json", *texts, *options)

    def mark(self, run: str) -> Path:
        """Return the file that a fault leaves, with its time."""
        return self.folder / f"{run}.mark"

    def run(self, *arguments: str) -> Ended:
        """Run the command; wait for its end.

        Raises:
            TimeoutError: it did not end.
            RuntimeError: the process ended.
        """
        self._commands.begin(*arguments)
        try:
            status, out, err = self._commands.finish(self._limit)
        except TimeoutError as error:
            raise TimeoutError(f"{' '.join(arguments)}: {error}") from None
        return Ended(status, out, err, time.time())

    def close(self) -> None:
        """End the process, and what it may have left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.communicate()


@contextmanager
def started(place: Path, number: int) -> Iterator[list[Launcher]]:
    """Start launchers in folders of their own in a block, and close them at its end."""
    launchers: list[Launcher] = []
    try:
        for index in range(number):
            launchers.append(Launcher(place / f"launcher{index}"))
        yield launchers
    finally:
        for launcher in launchers:
            launcher.close()


def side_by_side(work: Callable[[Launcher], object], launchers: Sequence[Launcher]) -> None:
    """Call a function with each launcher, on a thread each."""
    threads = [threading.Thread(target=work, args=(launcher,)) for launcher in launchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
