"""Runs that go on: from which checkpoints, in which layouts, on which data."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
from small_runs import DROPOUT, EXPERTS, TABLES, losses, run
from typer.testing import CliRunner

from hp_checkpoint import save
from hp_plan import ParallelPlan, lint
from hp_platform import get_platform
from hp_testing import on_ranks, run_ranks
from hyper_parallel.commands import cli
from hyper_parallel.data import DataError, write_tokens
from hyper_parallel.reports.output import OutputError, Step, as_json
from hyper_parallel.training.resuming import check_resume, keep_lines, next_sample, order

CONFIGS = ("config.json", "generation_config.json")

pytestmark = pytest.mark.framework("torch")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(1, run, folder, {}, 5)
    return folder


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    run_ranks(1, run, folder, {})
    return folder


def test_a_run_goes_on_from_files_of_each_rank(tmp_path, undisturbed):
    """Joined they are a model of transformers; a plan says how to get there."""
    run_ranks(2, run, tmp_path, {"dp_shard": 2}, changed={"checkpoint_layout": "shards"})
    saved = tmp_path / "run" / "checkpoints" / "step-00000003"
    ranks = {f"{part}-rank-0000{rank}.safetensors" for part in ("model", "optimizer") for rank in (0, 1)}
    assert {path.name for path in saved.iterdir()} == {*ranks, "manifest.json", "state.json", *CONFIGS}
    (diagnostic,) = lint({"model": {**TABLES["model"], "weights": str(saved)}})
    said, command = diagnostic.fix.split(": hyper-parallel ")
    assert (said, command) == ("join the files of each rank first", f"checkpoint convert {saved} TARGET")
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    done = CliRunner().invoke(cli.app, command.replace("TARGET", str(tmp_path / "model")).split())
    assert done.exit_code == 0, done.output
    assert lint({"model": {**TABLES["model"], "weights": str(tmp_path / "model")}}) == ()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "model")) is Qwen3ForCausalLM
    run_ranks(2, run, tmp_path, {"tp": 2}, 5, resume="auto")
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-5)
    assert (tmp_path / "run" / "checkpoints" / "step-00000005" / "model.safetensors").exists()


@pytest.mark.parametrize("after", [pytest.param({"tp": 2}, marks=pytest.mark.thorough), {"pp": 2}], ids=str)
def test_a_run_goes_on_in_another_layout(tmp_path, undisturbed, after):
    run_ranks(2, run, tmp_path, {"dp_shard": 2})
    with open(tmp_path / "run" / "metrics.jsonl", "a") as lines:
        lines.write(json.dumps({"step": 4}) + '\n{"step": 5, "lo')  # after the checkpoint, killed while writing
    texts = tmp_path / "run" / "texts.jsonl"
    texts.write_text('{"step": 2, "text": "to"}\n{"step": 4, "text": "be"}\n')
    run_ranks(2, run, tmp_path, after, 5, resume="auto")
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-5)
    assert texts.read_text() == '{"step": 2, "text": "to"}\n'
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000005",
    ]


def test_a_deterministic_run_goes_on_with_the_same_bits_on_other_ranks(tmp_path):
    """Four micro-batches of packed documents a step, on one rank or divided over two."""
    documents = [[place % 250 + number for place in range(2 + number)] for number in range(6)] * 12
    write_tokens(tmp_path / "corpus", documents, vocabulary=256)
    data = {"paths": [str(tmp_path / "corpus.bin")], "packing": True, "batch_size": 4}
    changed = {**data, "validation": {}, "deterministic": True}
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    run_ranks(1, run, tmp_path / "whole", {}, 4, changed={**changed, "accumulate": 4})
    run_ranks(2, run, tmp_path / "parts", {"dp_shard": 2}, 4, changed={**changed, "accumulate": 2}, until=3)
    checkpoints = tmp_path / "parts" / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000003")  # as of a run that was killed before it was written
    run_ranks(1, run, tmp_path / "parts", {}, 4, changed={**changed, "accumulate": 4}, resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    got, expected = (
        (tmp_path / folder / "run" / "checkpoints" / "step-00000004" / "model.safetensors").read_bytes()
        for folder in ("parts", "whole")
    )
    assert got == expected


def test_other_samples_under_the_numbers_of_a_run(tmp_path):
    run_ranks(1, run, tmp_path, {}, 1)
    (tmp_path / "swapped").write_bytes(b"to be or not to see " * 20)  # of the same size
    run_ranks(1, refused, tmp_path)
    (summary,) = run_ranks(1, run, tmp_path, {}, 2, changed={"batch_size": 2}, resume="auto")
    assert (summary.steps, summary.tokens) == (2, (4 + 2) * 8)


def test_what_forbids_to_go_on_is_found_before_ranks_start(tmp_path, begun, monkeypatch):
    folder, other = begun / "run", tmp_path / "other"
    other.write_bytes(b"to be or not to see " * 20)
    monkeypatch.setattr(cli, "prepare", lambda *_: 1)
    monkeypatch.setattr(cli, "_run", lambda *_: "ranks")
    monkeypatch.setattr(cli, "checked", lambda tables, *_, **__: ParallelPlan.from_dict(tables))
    command = ["train", str(folder / "plan.toml"), "--out", str(folder), "--resume", "auto", "--set"]
    for value, text in (
        ("run.seed=5", "step-00000003 can't go on with its data, whose samples are numbered anew: run.seed was 0 and"),
        ("data.sequence_length=9", "data.sequence_length was 8 and is 9"),
        (f"data.paths=['{other}']", "digest of the data was ["),
    ):
        done = CliRunner().invoke(cli.app, [*command, value])
        assert done.exit_code == 1 and text in done.output, done.output
    assert CliRunner().invoke(cli.app, [*command, "run.steps=4"]).exit_code == 0
    anew = ["new-data" if word == "auto" else word for word in command]
    assert CliRunner().invoke(cli.app, [*anew, f"data.paths=['{other}']"]).exit_code == 0
    damage(next((shutil.copytree(begun, tmp_path / "copy") / "run" / "checkpoints").iterdir()) / "state.json")
    plan = ParallelPlan.from_toml(folder / "plan.toml")
    check_resume(plan, tmp_path / "copy" / "run")  # the ranks pass over a checkpoint that is damaged
    check_resume(plan, tmp_path / "none")
    save({"data": None}, checkpoint_id=tmp_path / "strange" / "checkpoints" / "step-00000001", no_dist=True)
    with pytest.raises(DataError, match="step-00000001 has no position in the data"):
        check_resume(plan, tmp_path / "strange")


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, pytest.param({"tp": 2}, marks=pytest.mark.thorough)], ids=str)
def test_tokens_are_counted_without_padding(tmp_path, mesh):
    """Seven full samples and the rest of the text: an epoch of two steps."""
    packed = {"tokenizer": "bytes", "packing": True, "sequence_length": 57}
    run_ranks(2, run, tmp_path, mesh, 1, changed=packed)
    summary, _ = run_ranks(2, run, tmp_path, mesh, 2, changed=packed, resume="auto")
    assert (summary.steps, summary.tokens) == (2, 20 * 20), "not 2 * 4 * 57"


def test_a_checkpoint_from_before_orders_were_chosen_has_a_random_one(tmp_path):
    plan = ParallelPlan.from_dict({})
    saved = {"sample": 8, **order(plan, ())}
    del saved["data.shuffle"]
    assert next_sample(order(plan, ()), saved, tmp_path) == 8
    with pytest.raises(DataError, match=r"numbered anew: data\.shuffle was True and is False"):
        next_sample(order(ParallelPlan.from_dict({"data": {"shuffle": False}}), ()), saved, tmp_path)


def test_a_run_with_other_data_begins_elsewhere_by_the_option_that_is_named(tmp_path, begun):
    (place,) = (begun / "run" / "checkpoints").glob("step-00000003")
    with pytest.raises(DataError) as refused:
        check_resume(ParallelPlan.from_dict({**TABLES, "run": {"seed": 5}}), begun / "run")
    option, value = str(refused.value).split("elsewhere with ")[1].split()
    assert (option, value) == ("--weights", str(place))
    assert lint({"model": {**TABLES["model"], "weights": value}}) == ()
    run_ranks(1, run, tmp_path, {}, 1, {**TABLES["model"], "weights": value})


def refused(folder):
    for changed, text in (
        ({"seed": 5}, r"run\.seed was 0 and is 5"),
        ({"sequence_length": 9}, r"data\.sequence_length was 8 and is 9"),
        ({"shuffle": False}, r"data\.shuffle was True and is False"),
        ({"paths": [str(folder / "swapped")]}, r"digest of the data was \["),
    ):
        message = rf"step-00000001 can't go on .*{text}.*; set it back, .* --resume new-data, or .* --weights .*step"
        with pytest.raises(DataError, match=message):
            run(folder, {}, 2, changed=changed, resume="auto")


def test_other_data_with_the_states_of_a_run(tmp_path, undisturbed):
    """Its first step is that of another run with the weights; the optimizer and the schedule go on where they were."""
    other = tmp_path / "other"
    other.write_bytes(b"whether 'tis nobler in the mind to suffer " * 20)
    changed = {"paths": [str(other)]}
    run_ranks(1, run, tmp_path, {})
    for name in ("fresh", "same"):
        (tmp_path / name).mkdir()
    shutil.copytree(tmp_path / "run", tmp_path / "same" / "run")
    saved = tmp_path / "same" / "run" / "checkpoints" / "step-00000003"
    run_ranks(1, run, tmp_path, {}, 5, changed=changed, resume="new-data")
    weights = {**TABLES["model"], "weights": str(saved / "model.safetensors")}
    run_ranks(1, run, tmp_path / "fresh", {}, 2, weights, changed=changed)
    gone_on, fresh = losses(tmp_path)[6:], losses(tmp_path / "fresh")
    assert gone_on[:2] == pytest.approx(fresh[:2], rel=1e-6)
    assert gone_on[2:] != pytest.approx(fresh[2:], rel=1e-6)  # the fresh optimizer knows nothing yet
    run_ranks(1, run, tmp_path / "same", {}, 5, resume="new-data")  # and the same data goes on where it was
    assert losses(tmp_path / "same") == pytest.approx(losses(undisturbed), abs=1e-5)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000005")  # the newest is of the new data now
    (summary,) = run_ranks(1, run, tmp_path, {}, 5, changed=changed, resume="auto")
    assert summary.steps == 5 and losses(tmp_path)[6:] == pytest.approx(gone_on, abs=1e-5)


@on_ranks(2)
def test_ranks_that_read_different_data_are_refused(tmp_path):
    rank = get_platform().groups.rank()
    own = tmp_path / f"own{rank}"
    own.write_bytes(b"to be or not to be" * 20 + str(rank).encode())
    with pytest.raises(DataError, match="rank 1 reads other data than rank 0 from .*own.*the same files"):
        run(tmp_path, {"dp_shard": 2}, changed={"paths": [str(own)]})
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    own.write_bytes(b"to be or not to be" * 20)
    summary = run(tmp_path, {"dp_shard": 2}, steps=1, changed={"paths": [str(own)]})
    assert rank == 1 or summary.steps == 1


def test_files_that_were_cut_off_keep_the_steps_that_are_done(tmp_path):
    file = tmp_path / "metrics.jsonl"
    step = Step(step=1, loss=2.0, grad_norm=1.0, lr=0.1, tokens_per_second=8.0, peak_memory=9, seconds=1.0)
    line = as_json(step)
    file.write_text(f"{line}\n{line[:20]}")
    assert [Step(**values) for values in keep_lines(file, 2)] == [step]
    assert file.read_text() == f"{line}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert keep_lines(tmp_path / "none", 2) == []
    lines = [
        json.dumps({"step": number, "text": "{\u2028ü}"}, ensure_ascii=False).encode() + b"\n" for number in (1, 2, 3)
    ]
    file.write_bytes(b"".join(lines)[:-5])  # in the last letter's second byte
    assert [values["step"] for values in keep_lines(file, 1)] == [1]
    assert file.read_bytes() == lines[0]


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "state.json"])
def test_a_checkpoint_that_is_damaged_is_passed_over(tmp_path, begun, undisturbed, name):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "run" / "checkpoints" / "step-00000003" / name)
    run_ranks(1, resume_with_a_warning, tmp_path, name)
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-12)


def damage(file):
    data = bytearray(file.read_bytes())
    data[-100 % len(data)] ^= 1
    file.write_bytes(data)


def resume_with_a_warning(folder, name):
    with pytest.warns(RuntimeWarning, match=rf"the checkpoint of step 3 can't be read: .*{name}"):
        run(folder, {}, 5, resume="auto")


def test_dropout_goes_on_where_it_was(tmp_path):
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    run_ranks(1, run, tmp_path / "whole", {}, 5, DROPOUT)
    run_ranks(1, run, tmp_path / "parts", {}, 5, DROPOUT, until=3)
    run_ranks(1, run, tmp_path / "parts", {}, 5, DROPOUT, resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_muon_goes_on_where_it_was(tmp_path):
    groups = [
        {"patterns": ["model.norm.weight", "model.layers.*.*norm.weight"], "weight_decay": 0.0},
        {"patterns": ["model.embed_tokens.weight", "lm_head.weight"], "lr_multiple": 0.25},
        {"patterns": ["model.layers.*.mlp.down_proj.weight"], "lr_multiple": 2.0, "weight_decay": 0.5},
    ]
    optimizer = {"name": "muon", "groups": groups}
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    alone = {**optimizer, "groups": [groups[0], {**groups[1], "patterns": ["model.embed_tokens.weight"]}, groups[2]]}
    run_ranks(1, run, tmp_path / "whole", {}, 5, optimizer=alone)
    run_ranks(1, run, tmp_path / "parts", {}, 5, optimizer=alone, until=2)
    run_ranks(1, run, tmp_path / "parts", {}, 5, optimizer=alone, until=3, resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")[:6]
    run_ranks(2, run, tmp_path / "parts", {"pp": 2}, 5, optimizer=optimizer, until=4, resume="auto")
    run_ranks(2, run, tmp_path / "parts", {"dp_shard": 2}, 5, optimizer=alone, resume="auto")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    lines = (tmp_path / "parts" / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["lr"] for line in lines} == {1e-3}


def test_a_run_of_other_hyperparameters_does_not_go_on(tmp_path):
    decay = {"name": "adamw", "weight_decay": 0.1, "groups": [{"patterns": ["model.norm.weight"], "weight_decay": 0.0}]}
    run_ranks(1, run, tmp_path, {}, 1, optimizer=decay)
    for changed, text in (
        ({"weight_decay": 0.2}, r"the optimizer's weight_decay was 0\.1 and is 0\.2; go on with the plan"),
        ({"lr": 0.5}, r"lr was 0\.001 and is 0\.5"),
        ({"betas": [0.5, 0.6]}, r"betas was 0\.9, 0\.999 and is 0\.5, 0\.6"),
        (
            {"groups": []},
            r"'weight_decay' of the optimizer was saved as 0\.1 for .* and as 0\.0 for 'model\.nor",
        ),
    ):
        run_ranks(1, of_other_hyperparameters, tmp_path, {**decay, **changed}, text)
    run_ranks(1, run, tmp_path, {}, 2, optimizer=decay, resume="auto")


def of_other_hyperparameters(folder, optimizer, text):
    with pytest.raises(OutputError, match=rf"step-00000001 doesn't fit the plan: .*{text}"):
        run(folder, {}, 2, optimizer=optimizer, resume="auto")


def test_replicas_of_experts_go_on_where_they_were(tmp_path):
    """Replicas are chosen after steps 2 and 4: the run ends between, with replicas, and tokens that are counted."""
    changed, states = {"experts": {"slots": 1, "every": 2}}, []
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    run_ranks(2, run, tmp_path / "whole", {"dp_shard": 2, "ep": 2}, 5, EXPERTS, changed=changed)
    run_ranks(2, run, tmp_path / "parts", {"dp_shard": 2, "ep": 2}, 5, EXPERTS, changed=changed, until=3)
    run_ranks(2, run, tmp_path / "parts", {"dp_shard": 2, "ep": 2}, 5, EXPERTS, changed=changed, resume="auto")
    for folder in ("whole", "parts"):
        state = tmp_path / folder / "run" / "checkpoints" / "step-00000005" / "state.json"
        states.append(experts_in(json.loads(state.read_text())))
    assert states[0] == states[1]
    assert len(states[0]) == 2 and any(any(each["replicas"]) for each in states[0].values())
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def experts_in(tree):
    """The entry of experts in what a checkpoint has beside its tensors."""
    if isinstance(tree, dict):
        if "experts" in tree:
            return tree["experts"]
        tree = list(tree.values())
    return next(filter(None, map(experts_in, tree)), None) if isinstance(tree, list) else None


@on_ranks(2)
def test_a_run_of_another_model_does_not_go_on(tmp_path):
    run(tmp_path, {"dp_shard": 2})
    if get_platform().groups.rank() == 0:
        (tmp_path / "run" / "metrics.jsonl").unlink()
        with pytest.raises(OutputError, match=r"has a finished run of 3 steps, and no metrics\.jsonl .*run\.steps"):
            run(tmp_path, {"dp_shard": 2}, resume="auto")
    else:
        run(tmp_path, {"dp_shard": 2}, resume="auto")
    smaller = {**TABLES["model"], "overrides": {**TABLES["model"]["overrides"], "num_hidden_layers": 1}}
    with pytest.raises(OutputError, match=r"step-00000003 doesn't fit the plan: .*that the model lacks.*with --out"):
        run(tmp_path, {"dp_shard": 2}, 5, smaller, resume="auto")
    wider = {**TABLES["model"], "overrides": {**TABLES["model"]["overrides"], "hidden_size": 32}}
    with pytest.raises(OutputError, match=r"step-00000003 doesn't fit the plan: .*of shape.*with --out"):
        run(tmp_path, {"dp_shard": 2}, 5, wider, resume="auto")
    damage_all(tmp_path)
    first = get_platform().groups.rank() == 0
    with (
        pytest.warns(RuntimeWarning, match=r"can't be read") if first else contextlib.nullcontext(),
        pytest.raises(OutputError, match=r"no checkpoint that can be read: .*manifest\.json.*a backup, .*with --out"),
    ):
        run(tmp_path, {"dp_shard": 2}, 5, resume="auto")
    damage_all(tmp_path)  # the same bit again: as a backup has it
    (tmp_path / "other").mkdir(exist_ok=True)
    done = run(tmp_path, {"dp_shard": 2}, 5, resume="auto"), run(tmp_path / "other", {"dp_shard": 2}, 1, wider)
    assert not first or [summary.steps for summary in done] == [2, 1]  # without lines of the first three


def damage_all(folder):
    get_platform().collectives.barrier()
    if get_platform().groups.rank() == 0:
        for each in (folder / "run" / "checkpoints").glob("step-*"):
            damage(each / "manifest.json")
    get_platform().collectives.barrier()
