"""Trains the same job on PyTorch and on MindSpore and compares the losses: same weights, same text, same plan.

    python examples/compare_frameworks.py --torch TORCH/bin/python --mindspore MINDSPORE/bin/python

Each framework lives in an environment of its own, and is handed a file of initial weights that PyTorch drew. Both
run the command line, on 4 ranks. `nox -s compare` makes the environments and runs this.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parent
PLANS = {"torch": EXAMPLES / "qwen3_fsdp_tp.toml", "mindspore": EXAMPLES / "mindspore_qwen3_fsdp_tp.toml"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default=sys.executable, help="the Python of an environment with PyTorch")
    parser.add_argument("--mindspore", default=sys.executable, help="the Python of an environment with MindSpore")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference of a loss")
    parser.add_argument("--data", default=str(EXAMPLES.parent / "packages"), help="text to train on")
    parser.add_argument("--write-weights", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_weights:
        write_weights(options.write_weights)
        return
    with tempfile.TemporaryDirectory() as name:
        weights = Path(name) / "weights.safetensors"
        subprocess.run([options.torch, __file__, "--write-weights", str(weights)], check=True)
        runs = {
            framework: train(python, framework, weights, Path(name) / framework, options)
            for framework, python in [("torch", options.torch), ("mindspore", options.mindspore)]
        }
    largest = show(runs["torch"], runs["mindspore"])
    passed = largest <= options.tolerance
    print(f"{'equal' if passed else 'DIFFERENT'}: largest relative difference {largest:.1e} of {options.tolerance:.0e}")
    sys.exit(not passed)


def write_weights(file: str) -> None:
    """Writes what PyTorch draws for its plan."""
    from safetensors.torch import save_file

    from hp_plan import ParallelPlan, build_model

    model = build_model(ParallelPlan.from_toml(PLANS["torch"]))
    save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, file)


def train(python: str, framework: str, weights: Path, folder: Path, options: argparse.Namespace) -> list[dict]:
    """Runs a framework's plan; its steps."""
    command = [python, "-m", "hyper_parallel", "train", str(PLANS[framework]), "--steps", str(options.steps)]
    command += ["--weights", str(weights), "--data", options.data, "--out", str(folder)]
    print("$", *command, flush=True)
    subprocess.run(command, check=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def show(torch: list[dict], mindspore: list[dict]) -> float:
    """Prints both frameworks' losses and gradient norms; the largest relative difference of a loss."""
    print(f"{'step':>4} {'loss, torch':>13} {'mindspore':>13} {'relative':>9} {'norm, torch':>13} {'mindspore':>13}")
    largest = 0.0
    for ours, theirs in zip(torch, mindspore, strict=True):
        relative = abs(theirs["loss"] - ours["loss"]) / abs(ours["loss"])
        largest = max(largest, relative)
        losses = f"{ours['loss']:13.7f} {theirs['loss']:13.7f} {relative:9.1e}"
        print(f"{ours['step']:4} {losses} {ours['grad_norm']:13.6f} {theirs['grad_norm']:13.6f}")
    return largest


if __name__ == "__main__":
    main()
