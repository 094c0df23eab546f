"""What a finding says to do is done, and the plan that was refused is taken."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hp_plan
from hp_plan import Diagnostic, ParallelPlan, PlanError, lint
from hp_plan.extend import override, propose

pytestmark = pytest.mark.framework("torch")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


def config(name: str, **overrides: Any) -> dict[str, Any]:
    """A small model: the section `[model]`."""
    return {"config": name, "overrides": {**SMALL, **overrides}}


BASE = {"model": config("Qwen3Config"), "data": {"sequence_length": 32}}
TIED = config("Qwen3Config", tie_word_embeddings=True)
MOE = config("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
FIVE = {**MOE, "overrides": {**MOE["overrides"], "num_experts": 5}}
AUXILIARY = {**MOE, "overrides": {**MOE["overrides"], "output_router_logits": True}}
SCORES = config("LlamaConfig", num_labels=1, pad_token_id=0) | {"task": "sequence-classification"}
BERT = {
    "config": "BertConfig",
    "task": "masked-lm",
    "overrides": {key: each for key, each in SMALL.items() if key not in ("num_key_value_heads", "head_dim")},
}
LINEAR = {"function": "torch.nn:Linear", "overrides": {"in_features": 4, "out_features": 4}}
LLAMA4 = config("Llama4TextConfig", intermediate_size_mlp=64, num_local_experts=2)
ALIBI = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "alibi": True}
BART = {"config": "BartConfig", "task": "seq2seq-lm", "overrides": {"vocab_size": 64, "d_model": 32, "pad_token_id": 0}}
BART["overrides"] |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
LATENT = config("DeepseekV3Config", num_key_value_heads=4, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
LATENT["overrides"] |= {"q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 4}
MAMBA = {"config": "MambaConfig", "overrides": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}}
HEADS = {"function": "torch.nn:MultiheadAttention", "overrides": {"embed_dim": 4, "num_heads": 2}}
PAIRS = {"format": "preference", "sequence_length": 32}
MLP, ATTENTION, EXPERTS = "model.layers.*.mlp", "model.layers.*.self_attn", "model.layers.*.mlp.experts"
UP, DOWN, QUERY = f"{MLP}.up_proj", f"{MLP}.down_proj", f"{ATTENTION}.q_proj"
HEAD = {"lm_head": "colwise_gather_output", "model.embed_tokens": "embedding_rowwise"}
LORA = {"kind": "lora"}
EP = {"dp_shard": 2, "ep": 2}
EXACT = {"deterministic": True, "generation": "exact"}

# A part of what a finding says to do, the sections of the plan that it is about, and each way of doing it: assignments
# as of `--set`, `-key` for one that is left out. `ranks` is the number of ranks.
CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    # what a value is, and where it stands
    ("write it as [mesh] with one key a line", {"mesh": 3}, ["-mesh"]),
    ("write it as [[optimizer.groups]]", {"optimizer": {"groups": ["x"]}}, ["-optimizer.groups"]),
    ("write an integer", {"mesh": {"tp": "2"}}, ["mesh.tp=2"]),
    ('write "3", in quotes', {"data": {**BASE["data"], "tokenizer": 3}}, ['data.tokenizer="3"']),
    ('write ["model.layers.*"]', {"fsdp": {"groups": "model.layers.*"}}, ['fsdp.groups=["model.layers.*"]']),
    ('write ["wandb"]', {"metrics": {"sinks": "wandb"}}, ['metrics.sinks=["wandb"]']),
    ("did you mean 'wandb'?", {"metrics": {"sinks": ["wanbd"]}}, ['metrics.sinks=["wandb"]']),
    ("write true or false", {"fsdp": {"offload": 1}}, ["fsdp.offload=true", "fsdp.offload=false"]),
    ("write a number of at least 0.0", {"optimizer": {"weight_decay": -1.0}}, ["optimizer.weight_decay=0.0"]),
    ("did you mean 'adamw' or 'adamw8bit'?", {"optimizer": {"name": "adamw8"}}, ["optimizer.name=adamw"]),
    ("did you mean 'tp' or", {"mesh": {"tpp": 2}}, [("-mesh.tpp", "mesh.tp=2")]),
    ("did you mean 'lr'?", {"optimizer": {"learning_rate": 1e-4}}, [("-optimizer.learning_rate", "optimizer.lr=1e-4")]),
    ("did you mean mesh.dp_shard or", {"run": {"dp_size": 2}}, [("-run.dp_size", "mesh.dp_shard=2")]),
    ("it belongs to [run]: move it there", {"seed": 2}, [("-seed", "run.seed=2")]),
    ("'seed' belongs to [run]: move it there", {"mesh": {"seed": 2}}, [("-mesh.seed", "run.seed=2")]),
    ("'dtype' belongs to [adapter] or [run]", {"mesh": {"dtype": "bfloat16"}}, [("-mesh", "run.dtype=bfloat16")]),
    ("it belongs to [adapter] or [run]", {"dtype": "bfloat16"}, [("-dtype", "run.dtype=bfloat16")]),
    ("did you mean [adapter]?", {"lora": LORA}, [("-lora", "adapter.kind=lora")]),
    ("did you mean 'optimizer'?", {"optimizr": {"lr": 1e-4}}, [("-optimizr", "optimizer.lr=1e-4")]),
    ("did you mean 'auto'", {"styles": "atuo", "mesh": {"tp": 2}}, ["styles=auto"]),
    ("write 'auto' to take the model's own table", {"styles": 3, "mesh": {"tp": 2}}, ["styles=auto"]),
    (
        "name a style such as 'colwise'",
        {"styles": {UP: 1, DOWN: "rowwise"}, "mesh": {"tp": 2}},
        [f'styles."{UP}"=colwise'],
    ),
    # the mesh
    ("make it one of 2, 4, or raise mesh.dp_shard", {"model": MOE, "mesh": {"dp_shard": 4, "ep": 3}}, ["mesh.ep=4"]),
    ("raise mesh.dp_shard", {"model": MOE, "mesh": {"ep": 2}}, ["mesh.dp_shard=2"]),
    (
        "start 2 ranks (--nproc 2) or change the sizes in [mesh]",
        {"mesh": {"tp": 2}, "ranks": 4},
        ["ranks=2", "mesh.dp_shard=2"],
    ),
    (
        "make mesh.tp one of 1, 2, or the number of heads",
        {"mesh": {"tp": 4}},
        [
            "mesh.tp=1",
            "mesh.tp=2",
            "model.overrides.num_key_value_heads=4",
        ],
    ),
    ("it is for a Linear", {"styles": {"model.norm": "colwise"}, "mesh": {"tp": 2}}, ["styles={}"]),
    # styles
    (
        "did you mean 'colwise'",
        {"styles": {UP: "colwis", DOWN: "rowwise"}, "mesh": {"tp": 2}},
        [f'styles."{UP}"=colwise'],
    ),
    (
        "did you mean 'model.layers.*.mlp.up_proj'",
        {"styles": {f"{MLP}.u_proj": "colwise", DOWN: "rowwise"}, "mesh": {"tp": 2}},
        [f'styles={{"{UP}"="colwise", "{DOWN}"="rowwise"}}'],
    ),
    (
        "leave the last part off, or take a style for parameters: colwise",
        {"styles": {**HEAD, "lm_head.weight": "colwise_gather_output"}, "mesh": {"tp": 2}},
        [("styles={}", "styles.lm_head=colwise_gather_output")],
    ),
    (
        "use 'embedding_rowwise' for an Embedding",
        {"styles": {"model.embed_tokens": "rowwise"}, "mesh": {"tp": 2}},
        ["styles={'model.embed_tokens'='embedding_rowwise'}"],
    ),
    (
        "use 'embedding_colwise' for an Embedding",
        {"styles": {"model.embed_tokens": "colwise_gather_output"}, "mesh": {"tp": 2}},
        ["styles={'model.embed_tokens'='embedding_colwise'}"],
    ),
    (
        "use 'embedding_colwise' for an Embedding",
        {"styles": {"model.embed_tokens": "packed_colwise"}, "mesh": {"tp": 2}},
        ["styles={'model.embed_tokens'='embedding_colwise'}"],
    ),
    (
        "use 'rowwise' for a Linear",
        {"styles": {UP: "colwise", DOWN: "embedding_rowwise"}, "mesh": {"tp": 2}},
        [f'styles."{DOWN}"=rowwise'],
    ),
    (
        "make the patterns exclude each other, or remove one",
        {"styles": {UP: "colwise", DOWN: "rowwise", "model.layers.0.mlp.up_proj": "replicate"}, "mesh": {"tp": 2}},
        [f'styles={{"{UP}"="colwise", "{DOWN}"="rowwise"}}'],
    ),
    (
        "give them styles that shard the same dim, such as",
        {"model": TIED, "styles": {**HEAD, "model.embed_tokens": "embedding_colwise"}, "mesh": {"tp": 2}},
        ['styles."model.embed_tokens"=embedding_rowwise'],
    ),
    (
        "write 'packed_colwise', which shards each of the two",
        {
            "model": MOE,
            "styles": {
                f"{EXPERTS}.gate_up_proj": "colwise",
                f"{EXPERTS}.down_proj": "rowwise",
                EXPERTS: "moe_tp_experts",
            },
            "mesh": {"tp": 2},
        },
        [f'styles."{EXPERTS}.gate_up_proj"=packed_colwise'],
    ),
    (
        "write [styles] with one pattern = style per line",
        {"model": HEADS, "mesh": {"tp": 2}},
        ['styles={"out_proj"="rowwise"}'],
    ),
    # fsdp, batches, schedules
    (
        "leave [fsdp] out, or make mesh.dp_shard at least 2",
        {"mesh": {"tp": 2}, "fsdp": {"offload": True}},
        [
            "-fsdp",
            "mesh.dp_shard=2",
        ],
    ),
    (
        "make it true or false",
        {"model": MOE, "mesh": {"dp_shard": 4, "ep": 2}, "fsdp": {"reshard_after_forward": 2}},
        [
            "fsdp.reshard_after_forward=true",
            "fsdp.reshard_after_forward=false",
        ],
    ),
    (
        "make it one of 1, 2, 4",
        {"mesh": {"dp_shard": 4}, "fsdp": {"reshard_after_forward": 3}},
        [f"fsdp.reshard_after_forward={each}" for each in (1, 2, 4)],
    ),
    (
        "did you mean 'model.layers.*'",
        {"mesh": {"dp_shard": 2}, "fsdp": {"groups": ["model.layer.*"]}},
        ["fsdp.groups=['model.layers.*']"],
    ),
    (
        "group its members: 'model.layers.*'",
        {"mesh": {"dp_shard": 2}, "fsdp": {"groups": ["model.layers"]}},
        ["fsdp.groups=['model.layers.*']"],
    ),
    ("make it 6 or another multiple of 3", {"mesh": {"dp_shard": 3}}, ["data.batch_size=6", "data.batch_size=9"]),
    ("make it at most 100", {"schedule": {"warmup_steps": 101}}, ["schedule.warmup_steps=100"]),
    (
        "make it at most 64, or raise max_position_embeddings",
        {"data": {"sequence_length": 128}},
        [
            "data.sequence_length=64",
            "model.overrides.max_position_embeddings=128",
        ],
    ),
    (
        "write micro_batches = 4 in [pipeline] instead",
        {"mesh": {"pp": 2}, "run": {"accumulate": 4}},
        [("-run.accumulate", "pipeline.micro_batches=4")],
    ),
    (
        "make it one of 1, 2, 4, or data.batch_size a multiple of 6",
        {"mesh": {"dp_shard": 2}, "run": {"accumulate": 3}},
        [
            "run.accumulate=4",
            "data.batch_size=12",
        ],
    ),
    (
        "write output_router_logits = false in [model.overrides], or leave run.accumulate out",
        {"model": AUXILIARY, "run": {"accumulate": 2}},
        ["model.overrides.output_router_logits=false", "-run.accumulate"],
    ),
    # optimizer
    (
        "leave it out, or make optimizer.name 'sgd'",
        {"optimizer": {"momentum": 0.9}},
        [
            "-optimizer.momentum",
            "optimizer.name=sgd",
        ],
    ),
    (
        "leave it out, or make optimizer.name 'muon'",
        {"optimizer": {"muon": [f"{UP}.weight"]}},
        [
            "-optimizer.muon",
            "optimizer.name=muon",
        ],
    ),
    (
        "leave it out, or make schedule.kind 'wsd'",
        {"schedule": {"decay": "cosine"}},
        [
            "-schedule.decay",
            "schedule.kind=wsd",
        ],
    ),
    (
        "leave it out, or make objective.kind 'dpo'",
        {"objective": {"beta": 0.2}},
        [
            "-objective.beta",
            ("objective.kind=dpo", "data.format=preference"),
        ],
    ),
    (
        f"match matrices alone, such as '{QUERY}.weight'",
        {"optimizer": {"name": "muon", "muon": ["model.norm.weight"]}},
        [f"optimizer.muon=['{QUERY}.weight']"],
    ),
    (
        "did you mean 'model.layers.*.mlp.up_proj.weight'",
        {"optimizer": {"name": "muon", "muon": [f"{MLP}.up.weight"]}},
        [f"optimizer.muon=['{UP}.weight']"],
    ),
    (
        "leave it out, or fsdp.offload",
        {"mesh": {"dp_shard": 2}, "fsdp": {"offload": True}, "optimizer": {"swap_slices": 4}},
        ["-fsdp.offload", "-optimizer.swap_slices"],
    ),
    (
        "leave it out, or write name = 'adamw' or 'muon'",
        {"optimizer": {"name": "sgd", "swap_slices": 4}},
        [
            "-optimizer.swap_slices",
            "optimizer.name=adamw",
            "optimizer.name=muon",
        ],
    ),
    (
        "name parameters, as in patterns =",
        {"optimizer": {"groups": [{"weight_decay": 0.0}]}},
        [
            "optimizer.groups=[{patterns=['model.norm.weight'], weight_decay=0.0}]",
            "-optimizer.groups",
        ],
    ),
    (
        "give weight_decay or lr_multiple, or leave the group out",
        {"optimizer": {"groups": [{"patterns": ["model.norm.weight"]}]}},
        [
            "optimizer.groups=[{patterns=['model.norm.weight'], weight_decay=0.0}]",
            "optimizer.groups=[{patterns=['model.norm.weight'], lr_multiple=2.0}]",
            "-optimizer.groups",
        ],
    ),
    (
        "make the patterns exclude each other, or remove one",
        {
            "optimizer": {
                "groups": [
                    {"patterns": [f"{MLP}.*.weight"], "weight_decay": 0.0},
                    {"patterns": [f"{UP}.weight"], "lr_multiple": 2.0},
                ]
            }
        },
        [
            f"optimizer.groups=[{{patterns=['{MLP}.*.weight'], weight_decay=0.0}}]",
            f"optimizer.groups=[{{patterns=['{DOWN}.weight'], weight_decay=0.0}}, "
            f"{{patterns=['{UP}.weight'], lr_multiple=2.0}}]",
        ],
    ),
    (
        "let its patterns match both",
        {
            "model": TIED,
            "mesh": {"pp": 2},
            "optimizer": {"groups": [{"patterns": ["lm_head.weight"], "weight_decay": 0.0}]},
        },
        ["optimizer.groups=[{patterns=['lm_head.weight', 'model.embed_tokens.weight'], weight_decay=0.0}]"],
    ),
    (
        "did you mean 'model.norm.weight'",
        {"optimizer": {"groups": [{"patterns": ["model.nrom.weight"], "weight_decay": 0.0}]}},
        ["optimizer.groups=[{patterns=['model.norm.weight'], weight_decay=0.0}]"],
    ),
    # memory and compilation
    (
        "leave it out, or give memory.budget",
        {"memory": {"bandwidth": 1e9}},
        [
            "-memory.bandwidth",
            "memory.budget=20GiB",
        ],
    ),
    ('write for example budget = "20GiB"', {"memory": {"budget": "much"}}, ["memory.budget=20GiB"]),
    (
        "raise the budget, or mesh.dp_shard or mesh.tp",
        {"memory": {"budget": "600KiB"}},
        [
            "memory.budget=20MiB",
            "mesh.dp_shard=4",
            ("-memory.budget", 'memory.homes."model.layers.*"=host'),
        ],
    ),
    (
        "leave it out, or memory.budget",
        {"memory": {"recompute": [MLP], "budget": "1GiB"}},
        [
            "-memory.recompute",
            "-memory.budget",
        ],
    ),
    ("name each module once", {"memory": {"recompute": [MLP, "model.layers.0.mlp"]}}, [f"memory.recompute=['{MLP}']"]),
    (
        "name the one or the other",
        {"memory": {"recompute": ["model.layers.*"], "swap": [MLP]}},
        [
            "-memory.recompute",
            "-memory.swap",
        ],
    ),
    ("name its members: 'model.layers.*'", {"memory": {"swap": ["model.layers"]}}, ["memory.swap=['model.layers.*']"]),
    (
        'or write for example blocks = ["model.layers.*"]',
        {"compile": {"backend": "eager"}},
        [
            "-compile.backend",
            "compile.blocks=['model.layers.*']",
        ],
    ),
    (
        "leave [compile] out, or make mesh.tp 1",
        {"mesh": {"tp": 2}, "compile": {"blocks": ["model.layers.*"]}},
        ["-compile", "mesh.tp=1"],
    ),
    (
        "leave [compile] out, or memory.swap",
        {"memory": {"swap": [MLP]}, "compile": {"blocks": ["model.layers.*"]}},
        ["-compile", "-memory.swap"],
    ),
    (
        "did you mean 'inductor'",
        {"compile": {"blocks": ["model.layers.*"], "backend": "inducter"}},
        ["compile.backend=inductor"],
    ),
    (
        f"name the inner modules alone: '{MLP}'",
        {"compile": {"blocks": ["model.layers.*", MLP]}},
        [f"compile.blocks=['{MLP}']"],
    ),
    (
        "did you mean 'model.layers.*'",
        {"compile": {"blocks": ["model.layer.*"]}},
        ["compile.blocks=['model.layers.*']"],
    ),
    (
        "name its members: 'model.layers.*'",
        {"compile": {"blocks": ["model.layers"]}},
        ["compile.blocks=['model.layers.*']"],
    ),
    ("did you mean 'model.layers.*.mlp'", {"memory": {"swap": ["model.layers.*.mpl"]}}, [f"memory.swap=['{MLP}']"]),
    # where parameters live
    (
        "write for example cache",
        {"memory": {"homes": {MLP: "host"}, "cache": "much"}},
        ["-memory.cache", "memory.cache=4MiB"],
    ),
    ("leave it out, or give memory.homes", {"memory": {"cache": "4MiB"}}, ["-memory.cache"]),
    ("write 'host'", {"memory": {"homes": {MLP: "disk"}}}, [f'memory.homes."{MLP}"=host']),
    (
        "write 'host', or make mesh.dp_shard larger",
        {"memory": {"homes": {MLP: "neighbour"}}},
        [f'memory.homes."{MLP}"=host', ("-memory.homes", "mesh.dp_shard=4")],
    ),
    (
        "leave it out, or tie_word_embeddings = false",
        {
            "model": TIED,
            "mesh": {"tp": 2},
            "memory": {"homes": {"model.embed_tokens": "host"}},
        },
        ["-memory.homes", "model.overrides.tie_word_embeddings=false"],
    ),
    (
        "leave it out, or memory.cache",
        {"mesh": {"tp": 2}, "memory": {"homes": {MLP: "host"}, "cache": "1GiB"}},
        ["-memory.cache", ("-memory.homes", "-memory.cache")],
    ),
    (
        "leave it out, or run.deterministic",
        {"memory": {"homes": {MLP: "host"}}, "run": {"deterministic": True}},
        ["-memory.homes", "-run.deterministic"],
    ),
    (
        "did you mean 'model.layers.*'",
        {"memory": {"homes": {"model.layer.*": "host"}}},
        [("-memory.homes", 'memory.homes."model.layers.*"=host')],
    ),
    (
        "name its members: 'model.layers.*'",
        {"memory": {"homes": {"model.layers": "host"}}},
        [("-memory.homes", 'memory.homes."model.layers.*"=host')],
    ),
    (
        "name the one or the other",
        {"memory": {"homes": {"model.layers.*": "host", MLP: "host"}}},
        [("-memory.homes", 'memory.homes."model.layers.*"=host')],
    ),
    (
        "raise it, or give smaller modules homes",
        {"memory": {"homes": {"model.layers.*": "host"}, "cache": "1KiB"}},
        ["memory.cache=1MiB"],
    ),
    # how ranks communicate
    (
        "did you mean 'dp_replicate'",
        {"mesh": {"dp_replicate": 2}, "communication": {"wire": {"dp_replicat": "bf16"}}},
        [("-communication.wire.dp_replicat", "communication.wire.dp_replicate=bf16")],
    ),
    (
        "did you mean 'bf16'",
        {"mesh": {"dp_replicate": 2}, "communication": {"wire": {"dp_replicate": "bf17"}}},
        ["communication.wire.dp_replicate=bf16"],
    ),
    (
        "leave it out, or make replicas: mesh.dp_replicate",
        {"mesh": {"tp": 2}, "communication": {"wire": {"tp": "bf16"}}},
        ["-communication.wire.tp"],
    ),
    (
        "leave it out, or make mesh.dp_replicate larger",
        {"communication": {"wire": {"dp_replicate": "bf16"}}},
        ["-communication.wire.dp_replicate", "mesh.dp_replicate=2"],
    ),
    (
        "leave it out",
        {"mesh": {"dp_replicate": 2, "ranks_per_host": 2}, "communication": {"wire": {"dp_replicate": "bf16"}}},
        ["-communication.wire.dp_replicate"],
    ),
    ("leave it out", {"model": MOE, "mesh": {**EP, "order": ["dp_shard"]}}, ["-mesh.order"]),
    ("give it", {"mesh": {"dp_shard": 2, "tp": 2, "order": "auto"}}, ["mesh.ranks_per_host=2"]),
    ("write each of", {"mesh": {"tp": 2, "order": ["tpp"]}}, ["mesh.order=['tp']"]),
    ("write each of", {"mesh": {"pp": 2, "tp": 2, "order": ["tp", "pp"]}}, ["mesh.order=['pp', 'tp']"]),
    (
        "write dp_shard before cp",
        {"mesh": {"dp_shard": 2, "cp": 2, "order": ["cp", "dp_shard"]}},
        ["mesh.order=['dp_shard', 'cp']"],
    ),
    ("leave it out", {"communication": {"async_tensor_parallel": "auto"}}, ["-communication.async_tensor_parallel"]),
    (
        'leave it out, or write styles = "auto-sequence"',
        {"mesh": {"tp": 2}, "communication": {"async_tensor_parallel": "auto"}},
        ["-communication.async_tensor_parallel", "styles=auto-sequence"],
    ),
    # the sequence over ranks
    (
        "leave [context] out, or make mesh.cp at least 2",
        {"context": {"load_balance": False}},
        ["-context", "mesh.cp=2"],
    ),
    (
        "make it one of [1, 2, 4]",
        {"mesh": {"cp": 4}, "context": {"ulysses_degree": 3}},
        [f"context.ulysses_degree={each}" for each in (1, 2, 4)],
    ),
    ("make it 32", {"mesh": {"cp": 2}, "data": {"sequence_length": 30}}, ["data.sequence_length=32"]),
    (
        "leave cp out",
        {"model": config("Qwen3Config", attention_dropout=0.1), "mesh": {"cp": 2}},
        [
            "-mesh.cp",
            "model.overrides.attention_dropout=0.0",
        ],
    ),
    (
        "write attn_implementation = 'sdpa' in [model.overrides]",
        {"model": config("Qwen3Config", attn_implementation="eager"), "mesh": {"cp": 2}},
        ["model.overrides.attn_implementation=sdpa", "-mesh.cp"],
    ),
    ("leave cp out", {"model": MAMBA, "mesh": {"cp": 2}}, ["-mesh.cp"]),
    ("leave cp out", {"model": config("Qwen3NextConfig"), "mesh": {"cp": 2}}, ["-mesh.cp"]),
    ("leave cp out", {"model": LLAMA4, "mesh": {"cp": 2}}, ["-mesh.cp"]),
    ("leave cp out", {"model": {"config": "FalconConfig", "overrides": ALIBI}, "mesh": {"cp": 2}}, ["-mesh.cp"]),
    ("leave cp out", {"model": BART, "mesh": {"cp": 2}}, ["-mesh.cp"]),
    (
        "leave cp out, or take such a model",
        {"model": SCORES, "mesh": {"cp": 2}},
        ["-mesh.cp", ("-model.task", "-model.overrides.num_labels")],
    ),
    (
        "make it one of [1, 2]",
        {"mesh": {"cp": 4, "tp": 2}, "context": {"ulysses_degree": 4}},
        ["context.ulysses_degree=1", "context.ulysses_degree=2"],
    ),
    (
        'write styles = "auto", or leave cp out',
        {"model": LATENT, "mesh": {"cp": 2, "tp": 2}, "context": {"ulysses_degree": 1}, "styles": "auto-sequence"},
        ["styles=auto", ("-mesh.cp", "-context")],
    ),
    # stages
    ("leave [pipeline] out, or make mesh.pp at least 2", {"pipeline": {"schedule": "zbv"}}, ["-pipeline", "mesh.pp=2"]),
    (
        "leave [memory] out; a schedule such as 'v-half'",
        {"mesh": {"pp": 2}, "memory": {"budget": "20GiB"}},
        [
            "-memory",
            ("-memory", "pipeline.schedule=v-half"),
            ("-memory", "pipeline.schedule=v-min"),
        ],
    ),
    (
        "leave it out, or write schedule = 'interleaved' or 'looped-bfs'",
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv", "stages_per_rank": 1}},
        ["-pipeline.stages_per_rank", "pipeline.schedule=interleaved", "pipeline.schedule=looped-bfs"],
    ),
    (
        "leave it out, or write schedule = 'interleaved' or 'looped-bfs'",
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "auto", "stages_per_rank": 2}},
        ["-pipeline.stages_per_rank", "pipeline.schedule=interleaved", "pipeline.schedule=looped-bfs"],
    ),
    (
        "list 2 or 4 numbers of blocks",
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "auto", "split": [2, 1, 1]}},
        ["pipeline.split=[2, 2]", "pipeline.split=[1, 1, 1, 1]"],
    ),
    ("list 2 numbers of blocks", {"mesh": {"pp": 2}, "pipeline": {"split": [2, 1, 1]}}, ["pipeline.split=[2, 2]"]),
    ("list 2 numbers that sum to 4", {"mesh": {"pp": 2}, "pipeline": {"split": [2, 1]}}, ["pipeline.split=[1, 3]"]),
    (
        "make it one of 1, 2, 4, 8, or data.batch_size a multiple of 3",
        {"mesh": {"pp": 2}, "pipeline": {"micro_batches": 3}},
        ["pipeline.micro_batches=4", "data.batch_size=9"],
    ),
    (
        "make mesh.pp at most 4",
        {"mesh": {"pp": 8}},
        [
            "mesh.pp=4",
            "mesh.pp=2",
            "model.overrides.num_hidden_layers=8",
        ],
    ),
    (
        "leave pp out, take fewer stages a rank",
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "hanayo"}},
        [
            ("-mesh.pp", "-pipeline"),
            "pipeline.schedule=1f1b",
            "model.overrides.num_hidden_layers=8",
        ],
    ),
    (
        "take a schedule without stages there and back, such as 'interleaved', or tie_word_embeddings = false",
        {"model": TIED, "mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "zbv"}},
        ["pipeline.schedule=interleaved", "model.overrides.tie_word_embeddings=false"],
    ),
    (
        "leave pp or dp_shard out, or tie_word_embeddings = false",
        {"model": BERT, "mesh": {"pp": 2, "dp_shard": 2}},
        ["-mesh.pp", "-mesh.dp_shard", "model.overrides.tie_word_embeddings=false"],
    ),
    ("leave pp out, or write the stages yourself", {"model": LINEAR, "mesh": {"pp": 2}}, ["-mesh.pp"]),
    # experts
    (
        "leave [experts] out, or make mesh.ep at least 2",
        {"model": MOE, "mesh": {"dp_shard": 2}, "experts": {"slots": 1}},
        [
            "-experts",
            "mesh.ep=2",
        ],
    ),
    (
        "leave it out, or experts.combine",
        {"model": MOE, "mesh": EP, "experts": {"combine": "exact", "chunks": 2}},
        [
            "-experts.chunks",
            "-experts.combine",
        ],
    ),
    (
        "leave it out, or make mesh.pp 1",
        {"model": MOE, "mesh": {**EP, "pp": 2}, "experts": {"slots": 1}},
        [
            "-experts.slots",
            "mesh.pp=1",
        ],
    ),
    (
        "leave it out, or give experts.slots or experts.capacity",
        {"model": MOE, "mesh": EP, "experts": {"every": 9}},
        ["-experts.every", "experts.slots=1", "experts.capacity=8"],
    ),
    (
        "leave it out, or give experts.capacity",
        {"model": MOE, "mesh": {**EP, "pp": 2}, "experts": {"every": 9}},
        ["-experts.every", "experts.capacity=8"],
    ),
    (
        "leave it out, or take 'expert_parallel', with mesh.ep a multiple of mesh.tp",
        {
            "model": MOE,
            "mesh": {**EP, "tp": 2},
            "styles": {EXPERTS: "expert_tensor_parallel"},
            "experts": {"chunks": 2},
        },
        ["-experts.chunks", f"styles.'{EXPERTS}'=expert_parallel"],
    ),
    (
        f'add "{EXPERTS}" = "expert_parallel"',
        {"model": MOE, "mesh": EP, "styles": {}},
        [f"styles.'{EXPERTS}'=expert_parallel"],
    ),
    ("leave mesh.ep out; mesh.dp_shard and mesh.tp shard", {"mesh": EP, "styles": {}}, ["-mesh.ep"]),
    ("leave mesh.ep out; mesh.dp_shard and mesh.tp shard", {"mesh": EP}, ["-mesh.ep"]),
    (
        "take 'expert_parallel' for all of them",
        {
            "model": MOE,
            "mesh": {**EP, "tp": 2},
            "styles": {f"model.layers.{n}.mlp.experts": f"expert_{'tensor_' * (n > 1)}parallel" for n in range(4)},
        },
        [f"styles={{'{EXPERTS}'='expert_parallel'}}"],
    ),
    (
        "make mesh.ep at least 2, or leave the style out",
        {"model": MOE, "mesh": {"dp_shard": 2}, "styles": {EXPERTS: "expert_parallel"}},
        ["mesh.ep=2", "styles={}"],
    ),
    # adapters
    ('write kind = "lora", or leave [adapter] out', {"adapter": {"rank": 4}}, ["adapter.kind=lora", "-adapter"]),
    ('write targets = ["all-linear"]', {"adapter": {**LORA, "targets": []}}, ["adapter.targets=['all-linear']"]),
    (
        'write targets = ["all-linear"]',
        {"adapter": {**LORA, "targets": ["all-linear", "q_proj"]}},
        ["adapter.targets=['all-linear']"],
    ),
    ("did you mean 'q_proj'", {"adapter": {**LORA, "targets": ["q_prj"]}}, ["adapter.targets=['q_proj']"]),
    (
        "choose from model, embed_tokens",
        {"adapter": {**LORA, "modules": ["rotary_emb"]}},
        ["adapter.modules=['lm_head']"],
    ),
    (
        "leave it out, or [adapter]",
        {"model": {**BASE["model"], "freeze": ["lm_head"]}, "adapter": LORA},
        ["-model.freeze", "-adapter"],
    ),
    ("did you mean 'lm_head'", {"model": {**BASE["model"], "freeze": ["lm_haed"]}}, ["model.freeze=['lm_head']"]),
    ("leave some to train", {"model": {**BASE["model"], "freeze": ["model", "lm_head"]}}, ["model.freeze=['model']"]),
    (
        "name some of in_proj, x_proj, dt_proj, lm_head alone",
        {"model": MAMBA, "adapter": LORA},
        ["adapter.targets=['in_proj', 'x_proj', 'dt_proj', 'lm_head']"],
    ),
    (
        "name some of q_proj, k_proj, v_proj, o_proj, lm_head alone",
        {"adapter": {**LORA, "targets": ["up_proj"], "modules": ["mlp"]}},
        ["adapter.targets=['q_proj', 'k_proj', 'v_proj', 'o_proj', 'lm_head']"],
    ),
    (
        "name fewer modules in adapter.modules",
        {"adapter": {**LORA, "modules": ["model", "lm_head"]}},
        ["adapter.modules=['lm_head']"],
    ),
    (
        "leave [adapter] out: there is no Linear module",
        {"adapter": LORA, "model": {"function": "torch.nn:ReLU"}},
        ["-adapter"],
    ),
    (
        "make mesh.ep a divisor of 5, or adapt Linear modules alone: targets = ['q_proj', 'k_proj'",
        {"model": FIVE, "adapter": LORA, "mesh": EP},
        ["model.overrides.num_experts=4", "-mesh.ep", "adapter.targets=['q_proj', 'k_proj', 'v_proj', 'o_proj']"],
    ),
    (
        "leave it out, or adapt Linear modules alone: targets = ['q_proj', 'k_proj'",
        {"model": MOE, "adapter": LORA, "mesh": EP, "experts": {"slots": 1}},
        ["-experts.slots", "adapter.targets=['q_proj', 'k_proj', 'v_proj', 'o_proj']"],
    ),
    # objectives
    ("write kind = 'dpo' or 'reward' in [objective]", {"data": PAIRS}, ["objective.kind=dpo"]),
    (
        "give one of the two",
        {"objective": {"kind": "dpo", "function": "math:sqrt"}, "data": PAIRS},
        [
            "-objective.function",
            ("-objective.kind", "-data.format"),
        ],
    ),
    ("make mesh.pp 1", {"objective": {"kind": "dpo"}, "data": PAIRS, "mesh": {"pp": 2}}, ["mesh.pp=1"]),
    ("write format = 'preference' in [data]", {"objective": {"kind": "dpo"}}, ["data.format=preference"]),
    ("leave it out", {"objective": {"kind": "dpo"}, "data": {**PAIRS, "packing": True}}, ["-data.packing"]),
    (
        "leave it out, or leave data.packing out",
        {"data": {**BASE["data"], "packing": True, "shuffle": False}},
        ["-data.shuffle", "-data.packing"],
    ),
    (
        "leave it out, or leave data.weights out",
        {"data": {**BASE["data"], "paths": ["a.bin", "b.bin"], "weights": [1.0, 2.0], "shuffle": False}},
        ["-data.shuffle", "-data.weights"],
    ),
    (
        "leave it out",
        {"objective": {"kind": "dpo", "loss": "ipo", "label_smoothing": 0.1}, "data": PAIRS},
        ["-objective.label_smoothing"],
    ),
    (
        "write output_router_logits = false",
        {"model": AUXILIARY, "objective": {"kind": "dpo"}, "data": PAIRS},
        ["model.overrides.output_router_logits=false"],
    ),
    (
        "write task = 'sequence-classification' in [model], and num_labels = 1 in [model.overrides]",
        {"objective": {"kind": "reward"}, "data": PAIRS, "model": config("LlamaConfig", pad_token_id=0)},
        [("model.task=sequence-classification", "model.overrides.num_labels=1")],
    ),
    (
        "write pad_token_id = 0 in [model.overrides]",
        {"objective": {"kind": "reward"}, "data": PAIRS, "model": {**SCORES, "overrides": {**SMALL, "num_labels": 1}}},
        ["model.overrides.pad_token_id=0"],
    ),
    (
        "take a causal language model",
        {"objective": {"kind": "dpo"}, "data": PAIRS, "model": SCORES},
        [("-model.task", "-model.overrides.num_labels")],
    ),
    # data
    (
        "write packing = false in [data], or take one of",
        {"model": MAMBA, "data": {"packing": True, "sequence_length": 32}},
        ["data.packing=false", "model.config=LlamaConfig"],
    ),
    (
        "or write attn_implementation = 'sdpa' in [model.overrides]",
        {
            "model": config("Qwen3Config", attn_implementation="flex_attention"),
            "data": {**BASE["data"], "packing": True},
        },
        ["data.packing=false", "model.overrides.attn_implementation=sdpa"],
    ),
    (
        "write format = 'text', or take a causal language model of transformers",
        {"model": LINEAR, "data": {"format": "messages"}},
        ["data.format=text", "model={config='Qwen3Config', overrides={vocab_size=64, num_hidden_layers=2}}"],
    ),
    # what is watched
    (
        "leave [validation] out, and evaluate the checkpoints with --set mesh.pp=1; or leave pp out",
        {"mesh": {"pp": 2}, "validation": {"paths": ["x"]}},
        ["-validation", "-mesh.pp"],
    ),
    (
        "leave it out, and generate from the checkpoints",
        {"mesh": {"pp": 2}, "validation": {"prompts": ["x"]}},
        ["-validation.prompts"],
    ),
    (
        "leave it out, or give validation.paths",
        {"validation": {"batches": 3}},
        [
            "-validation.batches",
            "validation.paths=['x']",
        ],
    ),
    ("leave it out, or give profile.start", {"profile": {"steps": 4}}, ["-profile.steps", "profile.start=2"]),
    (
        "leave it out, or give validation.paths",
        {"run": {"keep_best": 1, "checkpoint_every": 100}},
        ["-run.keep_best", "validation.paths=['x']"],
    ),
    (
        "leave it out, or give run.checkpoint_every, a multiple of validation.every",
        {"run": {"keep_best": 1}, "validation": {"paths": ["x"], "every": 30}},
        ["-run.keep_best", "run.checkpoint_every=60"],
    ),
    (
        "make run.checkpoint_every a multiple of validation.every",
        {"run": {"keep_best": 1, "checkpoint_every": 50}, "validation": {"paths": ["x"], "every": 30}},
        ["run.checkpoint_every=60"],
    ),
    (
        "make profile.start or profile.steps smaller",
        {"profile": {"start": 99, "steps": 3}},
        [
            "profile.start=98",
            "profile.steps=2",
        ],
    ),
    ("name ranks of the mesh", {"profile": {"start": 2, "ranks": [1]}}, ["profile.ranks=[0]"]),
    # silent corruption
    (
        "leave it out, or give sdc.replay_every",
        {"sdc": {"replicas": True}},
        ["-sdc.replicas", ("-sdc.replicas", "sdc.replay_every=2")],
    ),
    (
        "leave one of the two out",
        {"sdc": {"replicas": True}, "mesh": {"dp_shard": 2}, "optimizer": {"swap_slices": 2}},
        ["-sdc.replicas", "-optimizer.swap_slices"],
    ),
    (
        "leave it out, or write memory.recompute",
        {"sdc": {"replay_every": 2}, "memory": {"budget": "1GiB"}},
        ["-sdc.replay_every", ("-memory.budget", "memory.recompute=['model.layers.*']")],
    ),
    (
        "leave one of the two out",
        {"model": MOE, "mesh": EP, "experts": {"slots": 1}, "sdc": {"replay_every": 2}},
        ["-sdc.replay_every", "-experts.slots"],
    ),
    # readings
    ('write ["loss", "gradient"]', {"monitor": {"every": 1, "phases": []}}, ["monitor.phases=['loss', 'gradient']"]),
    ('write ["norm", "range"]', {"monitor": {"every": 1, "numbers": []}}, ["monitor.numbers=['norm', 'range']"]),
    (
        "leave both out, or write memory.recompute",
        {"monitor": {"every": 1, "phases": ["forward"]}, "memory": {"budget": "1GiB"}},
        ["monitor.phases=['gradient']", ("-memory.budget", "memory.recompute=['model.layers.*']")],
    ),
    (
        "leave 'moment' out",
        {"monitor": {"every": 1, "phases": ["moment", "weight"]}, "optimizer": {"name": "adamw8bit"}},
        ["monitor.phases=['weight']"],
    ),
    (
        "did you mean 'model.layers.*'",
        {"monitor": {"every": 1, "names": ["model.layer.*"]}},
        ["monitor.names=['model.layers.*']"],
    ),
    (
        "name the block: 'model.layers.0'",
        {
            "monitor": {"every": 1, "phases": ["forward"], "names": ["model.layers.*.mlp"]},
            "compile": {"blocks": ["model.layers.*"]},
        },
        ["monitor.names=['model.layers.0']"],
    ),
    (
        "name its members: 'model.layers.*'",
        {"monitor": {"every": 1, "phases": ["forward"], "names": ["model.layers"]}},
        ["monitor.names=['model.layers.*']"],
    ),
    (
        "leave run.deterministic out, or make mesh.cp 1",
        {"mesh": {"cp": 2}, "run": {"deterministic": True}},
        [
            "-run.deterministic",
            "mesh.cp=1",
        ],
    ),
    ("make mesh.tp 1", {"mesh": {"tp": 2}, "styles": "auto", "run": EXACT}, ["mesh.tp=1", "-run.generation"]),
    (
        "write deterministic = true in [run]",
        {"run": {"generation": "exact"}},
        ["run.deterministic=true", "-run.generation"],
    ),
    (
        "make run.dtype 'float32' or 'bfloat16'",
        {"run": {**EXACT, "dtype": "float64"}},
        ["run.dtype=float32", "run.dtype=bfloat16", "-run.generation"],
    ),
    (
        "take a causal language model of gemma2, llama",
        {"model": MAMBA, "run": EXACT},
        ["model.config=LlamaConfig", "-run.generation"],
    ),
    (
        "write attention_dropout = 0.0 in [model.overrides]",
        {"model": config("Qwen3Config", attention_dropout=0.5), "run": EXACT},
        ["model.overrides.attention_dropout=0.0", "-run.generation"],
    ),
    (
        "write attn_implementation = 'sdpa' in [model.overrides]",
        {"model": config("Qwen3Config", attn_implementation="flex_attention"), "run": EXACT},
        ["model.overrides.attn_implementation=sdpa", "-run.generation"],
    ),
    # the model
    (
        'give one: config = "Qwen3Config"',
        {"model": {}},
        ["model.config=Qwen3Config", "model.function='torch.nn:Identity'"],
    ),
    ("did you mean 'Qwen3Config'", {"model": config("Qwen3Confg")}, ["model.config=Qwen3Config"]),
    (
        "did you mean 'hidden_size'",
        {"model": {"config": "Qwen3Config", "overrides": {**SMALL, "hiddn_size": 32}}},
        [("-model.overrides.hiddn_size", "model.overrides.hidden_size=64")],
    ),
    (
        'write it as "package.module:function"',
        {"model": {**LINEAR, "function": "torch.nn"}},
        ["model.function='torch.nn:Linear'"],
    ),
    (
        "did you mean 'Linear'",
        {"model": {**LINEAR, "function": "torch.nn:Linearr"}},
        ["model.function='torch.nn:Linear'"],
    ),
    (
        "give the folder of the function's module, or leave it out",
        {"model": {**LINEAR, "folder": "nowhere"}},
        [
            "model.folder='.'",
            "-model.folder",
        ],
    ),
    ("check the name", {"model": {**LINEAR, "function": "torch.n:Linear"}}, ["model.function='torch.nn:Linear'"]),
    (
        "correct [model.overrides], which are its arguments",
        {"model": {**LINEAR, "overrides": {"in_features": 4}}},
        ["model.overrides.out_features=4"],
    ),
    (
        "write task in [model]: one of 'base'",
        {"model": {"config": "CLIPConfig"}},
        ["model.task=base", "model.task=CLIPModel"],
    ),
    ("did you mean 'seq2seq-lm'?", {"model": {"config": "T5Config", "task": "seq2seq-lmm"}}, ["model.task=seq2seq-lm"]),
    ("did you mean 'T5Model'", {"model": {"config": "T5Config", "task": "T5Model2"}}, ["model.task=T5Model"]),
    (
        "write task in [model]: one of 'base'",
        {"model": {"config": "T5Config", "task": "masked-lm"}},
        ["model.task=base", "model.task=seq2seq-lm"],
    ),
    ("give a safetensors file", {"model": {**LINEAR, "weights": "nowhere"}}, ["-model.weights"]),
]


def followed(tables: dict[str, Any], way: Any) -> dict[str, Any]:
    """A plan after one way of doing what a finding says."""
    changed = copy.deepcopy(tables)
    for assignment in [way] if isinstance(way, str) else way:
        if assignment.startswith("-"):
            *path, last = assignment[1:].split(".")
            table = changed
            for key in path:
                table = table[key]
            del table[last]
        else:
            changed = override(changed, [assignment])
    return changed


def findings(tables: dict[str, Any]) -> list[Diagnostic]:
    ranks = tables.get("ranks")
    return list(lint({key: each for key, each in tables.items() if key != "ranks"}, ranks, run_model_code=True))


@pytest.mark.parametrize(("fix", "sections", "ways"), CASES, ids=[case[0] for case in CASES])
def test_what_a_finding_says_helps(fix: str, sections: dict[str, Any], ways: list[Any]):
    tables = {**BASE, **sections}
    found = findings(tables)
    assert any(fix in each.fix for each in found), found
    for way in ways:
        assert [str(each) for each in findings(followed(tables, way))] == [], way


@pytest.mark.parametrize(
    ("axis", "sections"),
    [
        ("pp", {"run": {"keep_best": 1, "checkpoint_every": 100}}),
        ("pp", {"validation": {"every": 3}}),
        ("cp", {"validation": {"prompt_tokens": 3}}),
    ],
)
def test_nothing_is_advised_that_the_rest_of_the_plan_cannot_have(axis: str, sections: dict[str, Any]):
    (found,) = findings({**BASE, **sections, "mesh": {axis: 2}})
    assert found.fix == "leave it out"


def sites(folder: Path) -> Iterator[tuple[Path, str, range]]:
    """Where findings are made: the file, the function around, and the lines of the call."""
    for file in sorted(folder.rglob("*.py")):
        if file.stem == "compared":  # its refusals are of calls, not of plans
            continue
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and getattr(call.func, "id", None) in MAKERS:
                        assert call.end_lineno is not None
                        yield file, function.name, range(call.lineno, call.end_lineno + 1)


MAKERS = ("Diagnostic", "matches_nothing", "never_called", "_refused", "_refusal", "_difference", "_weights_diagnostic")
# Findings that need more than a plan, or MindSpore, and the test that does what they say.
ELSEWHERE = {
    "mindspore/test_build_cells.py::test_what_a_finding_says_helps": (
        *("blocks:check_saving", "adapters:check_adapter", "checks:_check_device", "checks:check_mesh"),
        *("blocks:check_compile", "memory:check_memory", "memory:check_states", "loss:check_objective"),
        *("build:_check_statistics", "build:check_model_section", "unused_keys:check_profile"),
        *("homes:check_home_values", "checks:check_monitor", "checks:check_sdc"),
    ),
    "test_dry_run.py::test_what_can_not_be_played_is_refused": ("api:spread_over",),
    "test_precision.py::test_what_does_not_go_together_is_refused": (
        *("precision:check_precision", "precision:_check_tokens", "precision:_check_gather", "precision:check_layers"),
    ),
    "test_precision.py::test_shapes_that_cannot_be_multiplied_are_named": ("precision:_odd", "precision:_refused"),
    "test_precision_of_experts.py::test_what_does_not_go_together_is_refused": (
        *("precision:_check_dispatch", "precision:check_styled_layers"),
    ),
    "test_weights.py::test_a_plan_for_another_framework": ("checks:check_platform",),
    "test_weights.py::test_weights_of_another_model": (
        *("model_source:_weights_diagnostic", "model_source:load_weights"),
    ),
    "test_weights.py::test_a_tensor_that_one_rank_has_not_set_is_named_on_all": ("build:_drawn",),
    "test_expert_plans.py::test_a_load_balancing_loss_that_is_not_known_is_refused_where_ranks_have_other_tokens": (
        "experts:check_auxiliary_loss",
    ),
    "test_lint.py::test_a_module_whose_own_import_fails": ("model_source:_import_diagnostic",),
    "test_lint.py::test_what_a_function_returns_is_looked_at": ("model_source:check_returned",),
    "test_fixes.py::test_assignments": ("overrides:_parsed", "overrides:_refusal", "overrides:override"),
    "test_fixes.py::test_files_and_sections": ("plan:__post_init__", "plan:read_toml", "plan:to_toml"),
    "test_fixes.py::test_a_models_own_table": ("outline:declared_table",),
    "test_fixes.py::test_proposals": ("proposal:refusals",),
    "test_simulate.py::test_what_is_not_simulated_is_refused": ("simulated:check_bubble",),
    "test_lora.py::test_an_adapter_that_does_not_fit_is_named": (
        "adapters:_saved",
        "adapters:fill_adapter",
    ),
    "test_model_folders.py::test_mistakes": (
        *("folders:_config_of", "folders:_difference", "folders:_differences"),
        *("folders:check_fit", "folders:check_folder"),
    ),
    "test_model_folders.py::test_buffers_of_a_constructor_alone_need_the_configuration": ("build:compute_buffers",),
}


def test_assignments():
    tables = {"styles": "auto", "mesh": {"tp": 2}}
    for wrong, fix, way in (
        ("mesh.tp", "write such as mesh.tp=4", "mesh.tp=4"),
        ("data.paths=[a, b]", """such as --set 'data.paths=["a", "b"]'""", 'data.paths=["a", "b"]'),
        ("mesh.tp.x=4", "set mesh.tp itself", "mesh.tp=4"),
    ):
        with pytest.raises(PlanError) as refused:
            override(tables, [wrong])
        assert fix in refused.value.diagnostics[0].fix
        ParallelPlan.from_dict(override(tables, [way]))
    for quote in "'\"":
        assert override({}, [f"styles.{quote}{UP}{quote}=colwise"]) == {"styles": {UP: "colwise"}}


def test_files_and_sections(tmp_path: Path):
    with pytest.raises(PlanError, match="use ParallelPlan.from_dict for nested dictionaries"):
        ParallelPlan(mesh={"tp": 2})  # type: ignore[arg-type]
    assert ParallelPlan.from_dict({"mesh": {"tp": 2}}).mesh.tp == 2
    (tmp_path / "plan.toml").write_text("[mesh]\ntp = \n")
    with pytest.raises(PlanError, match=r"line 2.*; correct that line"):
        ParallelPlan.from_toml(tmp_path / "plan.toml")
    overrides = {**SMALL, "pad_token_id": None}
    with pytest.raises(PlanError, match="TOML has no null: leave the key out"):
        ParallelPlan.from_dict({"model": {"config": "Qwen3Config", "overrides": overrides}}).to_toml()
    text = ParallelPlan.from_dict({"model": {"config": "Qwen3Config", "overrides": SMALL}}).to_toml()
    (tmp_path / "plan.toml").write_text(text)
    assert ParallelPlan.from_toml(tmp_path / "plan.toml").model.overrides == SMALL


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ({"outproj": "rowwise"}, "did you mean 'out_proj' or"),
        (["out_proj"], "give it names of modules, such as 'blocks.*.query', as keys"),
    ],
    ids=str,
)
def test_a_models_own_table(wrong: Any, fix: str, monkeypatch: pytest.MonkeyPatch):
    tables = {"model": HEADS, "mesh": {"tp": 2}}
    monkeypatch.setattr(torch.nn.MultiheadAttention, "tp_plan", wrong, raising=False)
    assert fix in findings(tables)[0].fix
    monkeypatch.setattr(torch.nn.MultiheadAttention, "tp_plan", {"out_proj": "rowwise"})
    assert findings(tables) == []


def test_proposals():
    def unplayed(plan: ParallelPlan) -> Any:
        raise NotImplementedError("not here")

    tables = {"model": config("Qwen3Config", max_position_embeddings=2048)}
    trained = propose(tables, 1, play=unplayed).estimate.total
    with pytest.raises(PlanError) as refused:
        propose(tables, 1, play=unplayed, memory=trained - 1)
    assert refused.value.diagnostics[0].fix == "give more ranks or memory"
    assert propose(tables, 2, play=unplayed, memory=trained - 1)
    assert propose(tables, 1, play=unplayed, memory=trained)
    with pytest.raises(PlanError) as refused:
        propose(tables, 1, play=hp_plan.dry_run, memory=2 * trained)
    assert refused.value.diagnostics[0].fix == "give more ranks or memory, or make data.sequence_length smaller"
    assert propose({**tables, "data": {"sequence_length": 2}}, 1, play=hp_plan.dry_run, memory=2 * trained)


def test_every_finding_has_a_case(monkeypatch: pytest.MonkeyPatch):
    source = Path(hp_plan.__file__).parent
    passed: set[tuple[str, int]] = set()
    make = Diagnostic.__init__

    def record(self: Diagnostic, *args: Any, **named: Any) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            passed.add((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        make(self, *args, **named)

    monkeypatch.setattr(Diagnostic, "__init__", record)
    for _, sections, _ in CASES:
        findings({**BASE, **sections})
    elsewhere = {name for names in ELSEWHERE.values() for name in names}
    missing = [
        f"{file.stem}:{function} line {lines.start}"
        for file, function, lines in sites(source)
        if not any((str(file), line) in passed for line in lines) and f"{file.stem}:{function}" not in elsewhere
    ]
    assert not missing, "\n".join(missing)
    for test in ELSEWHERE:
        file, name = test.split("::")
        assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), test
