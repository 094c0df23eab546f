"""`hyper-parallel checkpoint`: on checkpoints of one process, without a framework."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from hp_checkpoint import Manifest, save
from hyper_parallel.commands.cli import app


def state(seed):
    model = {"w": np.full((3, 4), 1.0 + seed * 1e-3, np.float32), "b": np.arange(3)}
    return {"model": model, "optimizer": {"w": {"m": np.zeros(12)}}, "lr": 0.5 + seed}


@pytest.fixture
def run(tmp_path):
    for step in range(3):
        save(state(step), checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
    return tmp_path


def command(*arguments, code=0):
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_inspect(run):
    assert "model: 2 tensors, 72 bytes\n  b  I64 [3]\n  w  F32 [3, 4]\n" in command("inspect", run / "step-00000001")
    content = json.loads(command("inspect", run / "step-00000001", "--json"))
    assert content["parts"]["optimizer"] == {"tensors": {"w.m": ["F64", 12]}, "bytes": 96}
    assert "error: there is no checkpoint" in command("inspect", run / "step-9", code=1)


def test_files_of_each_rank(run, tmp_path):
    """What one layout of files has the other has; joined they are the same bytes."""
    save(state(1), checkpoint_id=run / "shards", no_dist=True, layout="shards")
    assert "bytes in 3 files, layout shards\n" in command("inspect", run / "shards")
    assert command("diff", run / "shards", run / "step-00000001") == "nothing differs\n"
    assert "every byte is as it was written" in command("verify", run / "shards")
    command("convert", run / "shards", run / "joined")
    assert [path.name for path in (run / "joined").iterdir()] == ["model.safetensors"]
    truth = (run / "step-00000001" / "model.safetensors").read_bytes()
    assert (run / "joined" / "model.safetensors").read_bytes() == truth


def test_pickles_are_converted_by_the_command_that_the_error_names(tmp_path):
    torch = pytest.importorskip("torch")
    file = tmp_path / "theirs" / "pytorch_model.bin"
    file.parent.mkdir()
    torch.save({"w": torch.ones(3)}, file)
    said = command("inspect", file.parent, code=1)
    named = said.split("`hyper-parallel checkpoint ")[1].split("`")[0].split()
    assert named == ["convert", "FILE", "TARGET"]
    command(named[0], file, tmp_path / "new")
    assert "model: 1 tensors, 12 bytes\n  w  F32 [3]\n" in command("inspect", tmp_path / "new")


def test_a_url_is_no_folder(run):
    for arguments in (
        ["inspect", "s3://b/c"],
        ["verify", "s3://b/c"],
        ["diff", "s3://b/c", run],
        ["convert", "s3://b/c"],
    ):
        more = [run / "new"] if arguments[0] == "convert" else []
        assert "is a URL; checkpoints are read and written in folders alone" in command(*arguments, *more, code=1)
    assert "is a URL" in command("convert", run / "step-00000001", "s3://b/c", code=1)


def test_verify(run):
    folder = run / "step-00000001"
    assert "every byte is as it was written" in command("verify", folder)
    for name in ("model.safetensors", "optimizer.safetensors"):
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
    text = command("verify", folder, code=1)
    assert "tensor 'w' changed since the save" in text and "tensor 'w.m' changed since the save" in text


def test_a_file_that_is_missing_is_named(run):
    folder = run / "step-00000001"
    (folder / "optimizer.safetensors").unlink()
    assert command("verify", folder, code=1) == f"{folder / 'optimizer.safetensors'} is missing\n"
    text = command("diff", folder, run / "step-00000000", code=1)
    assert f"error: {folder / 'optimizer.safetensors'} is missing\n" in text


def test_diff(run):
    one, other = run / "step-00000000", run / "step-00000002"
    assert command("diff", one, one) == "nothing differs\n"
    assert command("diff", one, one, "--json") == ""
    text = command("diff", one, other, code=1)
    assert text == "model: w: 12 of 12 elements differ, by up to 0.002\nstate.lr: 0.5 and 2.5\n"
    assert command("diff", one, other, "--tolerance", "0.01", code=1) == "state.lr: 0.5 and 2.5\n"
    save({"model": {"w": np.zeros(2), "v": np.zeros(1)}}, checkpoint_id=run / "small", no_dist=True)
    lines = [json.loads(line) for line in command("diff", one, run / "small", "--json", code=1).splitlines()]
    assert {"name": "model: w", "text": "F32 [3, 4] and F64 [2]"} in lines
    assert {"name": "model: v", "text": f"only in {run / 'small'}"} in lines


def test_convert(run):
    folder = run / "step-00000001"
    assert command("convert", folder, run / "model").strip() == f"{run / 'model'}: model.safetensors"
    assert load_file(run / "model" / "model.safetensors")["b"].tolist() == [0, 1, 2]
    assert "exists; name a folder that doesn't" in command("convert", folder, run / "model", code=1)
    assert "error: --to pt: expected hf or dcp" in command("convert", folder, run / "x", "--to", "pt", code=1)
    command("convert", folder, run / "half", "--dtype", "float16")
    half = load_file(run / "half" / "model.safetensors")
    assert half["w"].dtype == np.float16 and half["b"].dtype == np.int64 and (half["w"] == np.float16(1.001)).all()
    assert "error: dtype 'f4' is none to convert to" in command("convert", folder, run / "x", "--dtype", "f4", code=1)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert "tensor 'w' changed since the save" in command("convert", folder, run / "y", code=1)
    assert not [path for path in run.iterdir() if path.name.startswith(("x", "y"))]


def test_convert_to_the_format_of_torch_and_back(run):
    """All of a checkpoint, or the model alone; that torch loads it is a test of hp-checkpoint."""
    folder = run / "step-00000001"
    text = command("convert", folder, run / "dcp", "--to", "dcp").strip()
    assert text == f"{run / 'dcp'}: .metadata, __0_0.distcp"
    assert command("diff", folder, run / "dcp") == "nothing differs\n"
    assert "model: w: 12 of 12" in command("diff", run / "step-00000002", run / "dcp", code=1)
    command("convert", folder, run / "weights", "--to", "dcp", "--weights-only")
    content = json.loads(command("inspect", run / "weights", "--json"))
    assert content["parts"]["model"]["tensors"] == {"b": ["I64", 3], "w": ["F32", 3, 4]} and len(content["parts"]) == 1
    command("convert", run / "dcp", run / "model")
    assert (load_file(run / "model" / "model.safetensors")["w"] == np.float32(1.001)).all()
    assert "is of torch.distributed.checkpoint already" in command(
        "convert", run / "dcp", run / "x", "--to", "dcp", code=1
    )
    save({"pair": (np.zeros(2), 1)}, checkpoint_id=run / "tuple", no_dist=True)
    assert "'pair' is a tuple with tensors" in command("convert", run / "tuple", run / "x", "--to", "dcp", code=1)
    save({"a": {"b": 1}, "a.b": 2}, checkpoint_id=run / "twice", no_dist=True)
    assert "are both 'a.b' in torch.d" in command("convert", run / "twice", run / "x", "--to", "dcp", code=1)
    assert not (run / "x").exists()


def test_prune_by_metric(run):
    text = command("prune", run, "--best", 1, code=1)
    assert f"error: --best 1: no checkpoint in {run} was saved with a metric" in text.replace("\n", "")
    for step, metric in enumerate((0.5, 0.25, 1.0)):
        path = run / f"step-{step:08d}" / "manifest.json"
        path.write_bytes(replace(Manifest.from_bytes(path.read_bytes(), "x"), metric=metric).to_bytes())
    assert "step-00000001: metric 0.25, " in command("inspect", run / "step-00000001")
    assert "'smaller' or 'larger'" in command("prune", run, "--best", 1, "--better", "best", code=1)
    assert "removed step 0; " in command("prune", run, "--last", 1, "--best", 1)
    assert "removed step 1; " in command("prune", run, "--last", 1, "--best", 1, "--better", "larger")


def test_prune(run):
    assert f"removed step 1; {run} has steps 0, 2" in command("prune", run, "--last", 1, "--every", 2)
    assert f"removed nothing; {run} has steps 0, 2" in command("prune", run)


def test_the_folder_of_a_run_in_place_of_a_checkpoint(tmp_path):
    for step in range(3):
        save(state(step), checkpoint_id=tmp_path / "checkpoints" / f"step-{step:08d}", no_dist=True)
    newest = tmp_path / "checkpoints" / "step-00000002"
    assert command("inspect", tmp_path).startswith(f"{newest}: ")
    assert f"{newest}: " in command("verify", tmp_path)
    assert f"removed step 0; {tmp_path / 'checkpoints'} has steps 1, 2" in command("prune", tmp_path)
    (tmp_path / "empty").mkdir()
    text = command("prune", tmp_path / "empty", code=1)
    assert f"there is no checkpoint in {tmp_path / 'empty'}: no step-*, and no checkpoints/step-*" in text
