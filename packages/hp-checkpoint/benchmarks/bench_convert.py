"""Peak memory of `hyper-parallel checkpoint convert`, on a model of zeros whose file is sparse.

python packages/hp-checkpoint/benchmarks/bench_convert.py --gb 4 [--dtype float16]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from hp_checkpoint.extend import to_hugging_face
from hp_checkpoint.files import Kind, lay_out

SHAPE = (4096, 14336)


def main() -> None:
    """Write the model, convert it, print the peak memory of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model in bfloat16")
    parser.add_argument("--dtype", help="to convert to")
    options = parser.parse_args()
    kind = Kind("BF16", SHAPE)
    count = max(1, round(options.gb * 1e9 / kind.nbytes))
    (file,) = lay_out("model", {f"layers.{number}.weight": kind for number in range(count)}, limit=1 << 62)
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "model"
        source.mkdir()
        with open(source / file.name, "wb") as written:
            written.write(file.header)
            written.truncate(file.size)
        start = time.perf_counter()
        to_hugging_face(source, Path(place) / "converted", dtype=options.dtype)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{file.size / 1e9:.1f} GB in {seconds:.1f} s, peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
