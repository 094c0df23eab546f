"""Peak memory of `hyper-parallel checkpoint convert`, on a model of zeros whose files are sparse.

python packages/hp-checkpoint/benchmarks/bench_convert.py --gb 4 [--dtype float16] [--to dcp]
python packages/hp-checkpoint/benchmarks/bench_convert.py --sparse 30b  # the shapes of Qwen3-30B-A3B, 61 GB

With --sparse the converted files are sparse as well: what is all zeros is not written, since no disk may have the room.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hp_checkpoint.disk.files import Kind, index_of, lay_out
from hp_checkpoint.disk.storage import write_at, write_small
from hp_checkpoint.extend import to_dcp, to_hugging_face
from hp_checkpoint.formats import hugging_face

SHAPE = (4096, 14336)


def of_thirty_billion() -> dict[str, Kind]:
    """Return the tensors of Qwen3-30B-A3B as its folder has them."""
    layer = {"input_layernorm": (2048,), "post_attention_layernorm": (2048,), "mlp.gate": (128, 2048)}
    layer |= {f"self_attn.{name}_norm": (128,) for name in "qk"}
    layer |= {"self_attn.q_proj": (4096, 2048), "self_attn.o_proj": (2048, 4096)}
    layer |= {f"self_attn.{name}_proj": (512, 2048) for name in "kv"}
    for expert in range(128):
        layer |= {f"mlp.experts.{expert}.{name}_proj": (768, 2048) for name in ("gate", "up")}
        layer[f"mlp.experts.{expert}.down_proj"] = (2048, 768)
    shapes = {f"model.layers.{number}.{name}": shape for number in range(48) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (151936, 2048), "model.norm": (2048,), "lm_head": (151936, 2048)}
    return {f"{name}.weight": Kind("BF16", shape) for name, shape in shapes.items()}


def write_sparse(folder: Path, tensors: Mapping[str, Kind]) -> int:
    """Write a folder of zeros, and return its bytes."""
    files = lay_out("model", tensors)
    for file in files:
        with open(folder / file.name, "wb") as written:
            written.write(file.header)
            written.truncate(file.size)
    if len(files) > 1:
        write_small(folder / "model.safetensors.index.json", json.dumps(index_of(files)).encode())
    return sum(file.size for file in files)


def write_unless_zeros(descriptor: int, data: np.ndarray, offset: int, path: Path) -> None:
    """Write bytes at an offset, or make the file longer where they are all zeros."""
    if data.any():
        write_at(descriptor, data, offset, path)
    else:
        os.ftruncate(descriptor, max(os.fstat(descriptor).st_size, offset + len(data)))


def main() -> None:
    """Write the model, convert it, print the peak memory of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model in bfloat16")
    parser.add_argument("--sparse", choices=["30b"], help="in place of --gb: the shapes of a model of this size")
    parser.add_argument("--dtype", help="to convert to")
    parser.add_argument("--to", choices=["hf", "dcp"], default="hf", help="the format")
    options = parser.parse_args()
    if options.sparse and options.to == "dcp":
        parser.error("--to dcp writes archives, which are not sparse")
    tensors = of_thirty_billion()
    if options.sparse:
        hugging_face.write_at = write_unless_zeros
    else:
        kind = Kind("BF16", SHAPE)
        count = max(1, round(options.gb * 1e9 / kind.nbytes))
        tensors = {f"layers.{number}.weight": kind for number in range(count)}
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "model"
        source.mkdir()
        size = write_sparse(source, tensors)
        start = time.perf_counter()
        convert = to_dcp if options.to == "dcp" else to_hugging_face
        convert(source, Path(place) / "converted", dtype=options.dtype)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{size / 1e9:.1f} GB, {len(tensors):,} tensors in {seconds:.1f} s, peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
