"""Time to encode and decode what a wire sends, and the speed of a network below which it pays.

    python packages/hp-onesided/benchmarks/bench_wires.py
    python packages/hp-onesided/benchmarks/bench_wires.py --mebibytes 64 --repeats 50

Each line is a wire: milliseconds for each MiB of float32 that is encoded and that is decoded, on one core, and the
bytes it takes off the network. Where those bytes take longer than encoding and decoding, the wire pays.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from hp_onesided import Wire
from hp_onesided.torch.wire import cut, decode, encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=float, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = int(options.mebibytes * 2**18)
    values = cut(torch.randn(count), 1, count)
    print("| wire | encode, ms a MiB | decode, ms a MiB | bytes of float32's | pays below, GiB/s |")
    print("| --- | --- | --- | --- | --- |")
    for dtype in ("bf16", "e4m3", "int8"):
        for rounding in ("nearest", "stochastic"):
            wire = Wire(dtype, rounding=rounding)
            sent = encode(values, wire)
            there = milliseconds(partial(encode, values, wire), options.repeats) / options.mebibytes
            back = milliseconds(partial(decode, sent, wire, count), options.repeats) / options.mebibytes
            share = wire.nbytes(count) / (4 * count)
            pays = (1 - share) / 1024 / ((there + back) / 1e3)
            print(f"| {dtype}, {rounding} | {there:.2f} | {back:.2f} | {share:.2f} | {pays:.2f} |", flush=True)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median of processor time of a call."""
    times = []
    for _ in range(repeats + 2):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return statistics.median(times[2:]) * 1e3


if __name__ == "__main__":
    main()
