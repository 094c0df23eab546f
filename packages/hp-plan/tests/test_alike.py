"""Ranks that pass `apply` other weights, shapes or plans, and shared models other samples."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch

from hp_dtensor import DTensor
from hp_plan import ParallelPlan, PlanError, apply, build_model
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")  # MindSpore's are in mindspore/test_apply_cells.py

SIZES = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4}


def plan_of(mesh, layers=1, seed=0, **sections) -> ParallelPlan:
    overrides = {**SIZES, "num_hidden_layers": layers, "num_key_value_heads": 2}
    model = {"config": "LlamaConfig", "overrides": overrides}
    return ParallelPlan.from_dict({"model": model, "mesh": mesh, "run": {"seed": seed, "dtype": "float64"}, **sections})


def rank() -> int:
    return get_platform().groups.rank()


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


@on_ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate", "tp", "cp"])
def test_weights_of_other_seeds_are_those_of_rank_0(axis):
    expected = build_model(plan_of({axis: 2}), device=device_type())
    model = build_model(plan_of({axis: 2}, seed=rank()), device=device_type())
    model.model.rotary_emb.inv_freq.mul_(1 + rank())
    with pytest.warns(UserWarning, match=r"ranks \[1\] have other initial weights than rank 0 in 10 of .*'model.embed"):
        model = apply(model, plan_of({axis: 2}))
    for name, value in expected.named_parameters():
        assert torch.equal(whole(model.get_parameter(name)), value), name
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)


@on_ranks(2)
def test_equal_weights_are_left_as_they_are():
    model = build_model(plan_of({"dp_replicate": 2}), device=device_type())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.T.contiguous().T)  # strides say nothing
    before = model.lm_head.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(model, plan_of({"dp_replicate": 2}))
    assert torch.equal(whole(model.lm_head.weight), before)


@on_ranks(2)
def test_other_plans_and_shapes_are_refused_on_all_ranks():
    mesh = {("tp", "dp_shard")[rank()]: 2}
    with pytest.raises(ValueError, match=r"rank 0 has mesh = .*tp=2.* where rank 1 has mesh = .*dp_shard=2"):
        apply(build_model(plan_of(mesh), device=device_type()), plan_of(mesh))
    model = build_model(plan_of({"tp": 2}, layers=1 + rank()), device=device_type())
    with pytest.raises(ValueError, match=r"rank 0 has model.norm.weight: \(16,\) .* where rank 1 has model.layers.1"):
        apply(model, plan_of({"tp": 2}))


@on_ranks(2)
def test_a_model_that_one_rank_refuses_is_refused_on_all():
    model = build_model(plan_of({"tp": 2}), device=device_type())
    plan = plan_of(
        {"tp": 2}, styles={"model.layers.*.mlp.nothing" if rank() else "model.layers.*.mlp.up_proj": "colwise"}
    )
    expected = (ValueError, r"(?s)the plan is refused by rank 1: .*nothing") if rank() == 0 else (PlanError, "nothing")
    with pytest.raises(expected[0], match=expected[1]):
        apply(model, plan)


PROGRAM = """
import os
import sys
from hp_plan import ParallelPlan, apply, build_model
plan = ParallelPlan.from_dict({"model": {"config": "LlamaConfig", "overrides": %r}, "mesh": {"tp": 2},
    "styles": {"model.layers.*.mlp." + ("nothing" if os.environ["RANK"] in sys.argv else "up_proj"): "colwise"}})
print("begun", os.environ["RANK"], flush=True)
apply(build_model(plan), plan)
"""


def launched(folder, *refusing: str) -> subprocess.CompletedProcess[str]:
    """Run a script of two ranks under torchrun, some of which have a plan that the model refuses."""
    script = folder / "script.py"
    script.write_text(PROGRAM % {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 2})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HYPER_PARALLEL_DEVICE": "cpu"}
    done = subprocess.run([*command, *refusing], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout.count("begun") == 2, done.stderr
    return done


def test_a_script_says_what_all_ranks_refuse_once(tmp_path):
    told = launched(tmp_path, "0", "1").stderr
    assert told.count("PlanError on all ranks: the plan has 1 error:\n  styles.") == 1, told
    assert told.count("matches no module") == 1 and 'script.py", line' not in told, told
    assert "the plan has errors, listed above: styles." in told, "torchrun repeats what is wrong"


@pytest.mark.thorough  # the error itself: test_a_model_that_one_rank_refuses_is_refused_on_all
def test_a_script_says_what_one_rank_refuses_with_its_traceback(tmp_path):
    told = launched(tmp_path, "1").stderr
    assert "on all ranks" not in told and 'script.py", line' in told, told
    assert "matches no module" in told, told


@on_ranks(2)
def test_ranks_of_tp_that_are_passed_other_samples_are_refused_before_they_compute():
    plan = plan_of({"tp": 2})
    model = apply(build_model(plan, device=device_type()), plan)
    tokens = torch.arange(16, device=device_type()).view(2, 8)
    with pytest.raises(
        ValueError, match=r"tp: ranks \[0, 1\] compute the same samples .* is passed input_ids \(2, 8\)"
    ):
        model(input_ids=tokens.roll(rank()))
    with pytest.raises(ValueError, match=r"rank 0 is passed input_ids \(2, 8\).* rank 1 is passed input_ids \(2, 7\)"):
        model(input_ids=tokens[:, : 8 - rank()])
    with pytest.raises(ValueError, match=r"rank 0 is passed nothing where rank 1 is passed attention_mask"):
        model(input_ids=tokens, **({"attention_mask": torch.ones_like(tokens)} if rank() else {}))
    assert model(input_ids=tokens).logits.shape == (2, 8, 16)


@on_ranks(2)
def test_ranks_of_pp_that_are_passed_other_samples_are_refused_before_they_compute():
    plan = plan_of({"pp": 2}, layers=2, pipeline={"micro_batches": 2})
    model = apply(build_model(plan, device=device_type()), plan)
    tokens = torch.arange(16, device=device_type()).view(2, 8)
    with pytest.raises(ValueError, match=r"pp: ranks \[0, 1\] compute the same samples .* is passed input_ids"):
        model.run(input_ids=tokens.roll(rank()), labels=tokens)
    inputs = {"labels": tokens} if rank() else {"input_ids": tokens, "labels": tokens}  # a rank may pass what it needs
    assert len(model.run(**inputs)) == 2 * rank()
