"""What the outcomes of torch's tests mean: the first rule whose pattern is in an outcome's text names its class."""

from __future__ import annotations

import re
from typing import Any

INTERNALS, PURPOSE, REFUSED = "torch internals", "other on purpose", "refused"
CLASSES = ("passed", "skipped", "fails on torch", INTERNALS, PURPOSE, REFUSED, "bug", "not judged")

RULES: tuple[tuple[str, str, str], ...] = (
    (r"TorchInternalError: ", INTERNALS, "uses a private name"),
    (r"AttributeError: .* has no attribute '_(?!cuda)", INTERNALS, "uses a private attribute"),
    (r"AttributeError: 'function' object has no attribute 'state'", INTERNALS, "reads FSDP's state"),
    (r"AttributeError: 'TensorSpec' object has no attribute", INTERNALS, "reads a DTensor's spec"),
    (r"AsyncCollectiveTensor", INTERNALS, "the class of a result of a functional collective"),
    (r'AssertionError: "[^\n]*" does not match "', INTERNALS, "refused here too, in other words than torch's"),
    (r"has \d+ ranks, but the world has 4 ranks", "skipped", "needs more ranks"),
    (r"AbsentNameError: ", PURPOSE, "uses a public name that these packages don't have"),
    (r"AssertionError: [^\n]*RaggedShard", PURPOSE, "fully_shard's shards are ragged"),
    (r"unexpected keyword argument '_", INTERNALS, "passes a private argument"),
    (r"TypeError: [\w.]+\(\) (?:got an unexpected keyword|takes \d+ positional)", PURPOSE, "another signature"),
    (
        r'File "[^"]*/hp_\w+/[^"]*", line \d+, in \S+\n\s+raise [^\n]*\n(?:\s+\^+\n)?[\w.]*Error: ',
        REFUSED,
        "by an error of these packages",
    ),
)
SEEN: tuple[tuple[str, str, str], ...] = (  # tests that were read one by one, without their test_
    (PURPOSE, "a mesh without names is taken", "2d_mesh_without_mesh_dim_names"),
    (PURPOSE, "uneven shards of any dim are taken", "init_1d_uneven_shard_largest_dim"),
    (PURPOSE, "fully_shard's shards are ragged", "init_2d_transformer_shard_diff_dim"),
    (PURPOSE, "parameters that are not contiguous are taken", "raise_noncontiguous_parameter"),
    (PURPOSE, "scalar parameters are taken", "raise_scalar_parameter"),
    (PURPOSE, "the axis of the mesh that fully_shard makes has a name", "shard_tensor_parameters"),
    (PURPOSE, "a shard of dim 1 is a view with strides", "shard_placement_fn_contiguous_params_grads"),
    (
        PURPOSE,
        "outside forward and backward parameters are the sharded ones",
        "param_registration_after_forward",
    ),
    (PURPOSE, "bfloat16 sums in another order: the shards have other owners", "reduce_dtype"),
    (
        PURPOSE,
        "expects elements of each parameter on a rank; a ragged shard may be empty",
        "dp_state_dict_save_load dp_tp_state_dict_save_load hsdp_tp_state_dict_save_load clip_grad_norm_1d "
        "clip_grad_norm_2d hsdp_broadcast_across_replicas",
    ),
    (PURPOSE, "counts collectives; one more compares the ranks' models at the start", "gradient_accumulation"),
    (PURPOSE, "a gradient keeps the layout of its tensor", "nll_loss_and_cross_entropy"),
    (INTERNALS, "reads a private list", "optimizer_foreach_supported_types_include_DTensor"),
    (INTERNALS, "torch's fake backend copies, between equal shapes only", "comm_mode_with_dtensor"),
    (INTERNALS, "CommDebugMode describes torch's own DTensors", "MLP_distributed_sharding_display"),
    (PURPOSE, "no deprecated argument submodules", "deprecate_partial"),
    (
        PURPOSE,
        "names of a DDP model keep their module.",
        "activation_ckpt_fqns_ddp extra_state non_persistent_buffers",
    ),
    (PURPOSE, "readers have other methods", "storage_meta"),
    (PURPOSE, "axes are taken in any order", "get_item_3d_noncontiguous_slicing"),
    (PURPOSE, "a sharded module's class keeps its name", "fully_shard_cls"),
    (PURPOSE, "gradients of replicated parameters are summed by the backward pass", "sequence_parallel_style"),
    (INTERNALS, "replicate() finds FSDP's modules in torch's registry; refused here", "unshard_async"),
    (PURPOSE, "writes into a view of a leaf; autograd refuses", "fill_inplace fill_inplace_partial_sum zero_inplace"),
    (PURPOSE, "no deprecated form, so no warning of it", "distribute_module_input_fn_output_fn_warning"),
    (
        PURPOSE,
        "off the mesh a local tensor keeps its number of dims",
        "default_value_sub_mesh redistribute_sub_mesh from_local_sub_mesh zeros_submesh",
    ),
    (PURPOSE, "torch.load is told which classes are safe by the program", "dtensor_save_load_import"),
    (PURPOSE, "dropout of a Partial is taken", "dropout_errors"),
)
READ = {f"test_{name}": (kind, why) for kind, why, names in SEEN for name in names.split()}


def judge(row: dict[str, Any]) -> tuple[str, str]:
    """Return the class of an outcome, and why."""
    text, outcome = row["text"], row["outcome"]
    if outcome == "passed" and "counted" in row:
        return PURPOSE, "other collectives, right values"
    if outcome in ("passed", "skipped"):
        return outcome, text[:200]
    name = row["test"].rpartition(".")[2]
    if name in READ and outcome == "failed":
        return READ[name]
    for pattern, kind, why in RULES:
        if re.search(pattern, text) and outcome == "failed":
            return kind, why
    if row.get("torch") and row["torch"]["outcome"] != "passed":
        return "fails on torch", row["torch"]["outcome"]
    return "not judged", ""
