"""Trains the same job on PyTorch and on MindSpore and compares them: same weights, same text, same plan.

    python examples/compare_frameworks.py --torch TORCH/bin/python --mindspore MINDSPORE/bin/python

Each framework lives in an environment of its own, and is handed a file of initial weights that PyTorch drew. First the
models are compared, in one process each: transformers' Qwen3 and that of MindSpore Cells, loss and gradients. Then both
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
PLAN = EXAMPLES / "mindspore_qwen3_fsdp_tp.toml"
FRAMEWORKS = ("torch", "mindspore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default=sys.executable, help="the Python of an environment with PyTorch")
    parser.add_argument("--mindspore", default=sys.executable, help="the Python of an environment with MindSpore")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference of a loss")
    parser.add_argument("--gradients", nargs=2, help=argparse.SUPPRESS)  # What each framework's Python is asked for.
    options = parser.parse_args()
    if options.gradients:
        framework, folder = options.gradients
        (torch_gradients if framework == "torch" else mindspore_gradients)(Path(folder))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for framework in FRAMEWORKS:
            python = getattr(options, framework)
            subprocess.run([python, __file__, "--gradients", framework, name], check=True)
        show_gradients(folder)
        sources = sorted(EXAMPLES.parent.glob("packages/*/src/**/*.py"))
        (folder / "text").write_bytes(b"".join(source.read_bytes() for source in sources))
        torch = train(options.torch, folder / "torch.toml", folder, options)
        mindspore = train(options.mindspore, PLAN, folder, options)
    largest = show(torch, mindspore)
    passed = largest <= options.tolerance
    print(f"{'equal' if passed else 'DIFFERENT'}: largest relative difference {largest:.1e} of {options.tolerance:.0e}")
    sys.exit(not passed)


def torch_gradients(folder: Path) -> None:
    """Writes PyTorch's plan, the weights that it draws, a batch, and the loss and gradients of these."""
    import torch
    from safetensors.torch import save_file

    from hp_plan import ParallelPlan, build_model

    plan = ParallelPlan.from_toml(PLAN).to_dict()
    # The same plan, and transformers' model in place of the one of Cells.
    plan["model"] = {"config": "Qwen3Config", "overrides": plan["model"]["overrides"]}
    plan["run"]["platform"] = "torch"
    plan = ParallelPlan.from_dict(plan)
    (folder / "torch.toml").write_text(plan.to_toml())
    model = build_model(plan)
    tokens = torch.randint(256, (4, plan.data.sequence_length), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False)["loss"]
    loss.backward()
    parameters = dict(model.named_parameters())
    save_file({name: parameter.detach() for name, parameter in parameters.items()}, folder / "weights.safetensors")
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    save_file({**gradients, "loss": loss.detach(), "tokens": tokens}, folder / "torch.safetensors")


def mindspore_gradients(folder: Path) -> None:
    """Writes the loss and gradients of the same weights and batch."""
    import mindspore
    from safetensors.numpy import load_file, save_file

    from hp_plan import ParallelPlan, build_model

    sys.path.insert(0, str(EXAMPLES))
    tables = ParallelPlan.from_toml(PLAN).to_dict()
    tables["model"]["weights"] = str(folder / "weights.safetensors")
    model = build_model(ParallelPlan.from_dict(tables))
    tokens = mindspore.Tensor(load_file(folder / "torch.safetensors")["tokens"])
    parameters = dict(model.parameters_and_names())
    loss, gradients = mindspore.value_and_grad(
        lambda: model(tokens, tokens)["loss"], None, mindspore.ParameterTuple(parameters.values())
    )()
    arrays = {name: gradient.asnumpy() for name, gradient in zip(parameters, gradients)}
    save_file({**arrays, "loss": loss.asnumpy()}, folder / "mindspore.safetensors")


def show_gradients(folder: Path) -> None:
    """Prints how far the two models are from each other in one process."""
    from safetensors.numpy import load_file

    torch, mindspore = (load_file(folder / f"{name}.safetensors") for name in FRAMEWORKS)
    del torch["tokens"]
    assert torch.keys() == mindspore.keys(), torch.keys() ^ mindspore.keys()
    far = {name: abs(mindspore[name] - torch[name]).max() / abs(torch[name]).max() for name in torch}
    loss, worst = far.pop("loss"), max(far, key=far.__getitem__)
    print(f"one process: relative difference of the loss {loss:.1e}; of {len(far)} gradients, most", end=" ")
    print(f"{far[worst]:.1e} ({worst})")


def train(python: str, plan: Path, folder: Path, options: argparse.Namespace) -> list[dict]:
    """Runs a plan from the weights in `folder`; its steps."""
    out = folder / f"{plan.stem}-run"
    command = [python, "-m", "hyper_parallel", "train", str(plan), "--steps", str(options.steps)]
    command += ["--weights", str(folder / "weights.safetensors"), "--data", str(folder / "text"), "--out", str(out)]
    print("$", *command, flush=True)
    subprocess.run(command, check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


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
