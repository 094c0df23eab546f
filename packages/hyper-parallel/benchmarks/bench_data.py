"""CPU time of training data: the order of samples, rows of tokens, packing, and going on in the middle of an epoch."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hyper_parallel.data import Mixture, Packed, TokenFile, Windows, permuted, write_tokens


def cpu(work: Callable[[int], object], repeats: int = 30) -> float:
    """Return the median CPU seconds of a call."""
    times = []
    for number in range(repeats):
        begun = time.process_time()
        work(number)
        times.append(time.process_time() - begun)
    return statistics.median(times)


def main() -> None:
    """Print a line for each."""
    for count in (8, 1024):
        numbers = np.arange(count) + 7 * 10**11
        seconds = cpu(lambda _, numbers=numbers: permuted(numbers, count=10**12, seed=0))
        print(f"order: {count} of 10^12 samples in {1e3 * seconds:.2f} ms")
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        lengths = random.lognormal(6, 1, 20_000).astype(int) + 1
        documents = (random.integers(0, 50_000, length) for length in lengths)
        write_tokens(Path(folder) / "corpus", documents, vocabulary=50_000)
        file, length, batch = TokenFile(Path(folder) / "corpus"), 2048, 32
        windows, packed = Windows([file.tokens], length, seed=0), Packed(file, length, seed=0)
        mixed = Mixture([windows, packed], [1, 1], seed=0)
        for name, samples in (("windows", windows), ("packed", packed), ("mixed", mixed)):
            seconds = cpu(lambda step, samples=samples: samples.rows(np.arange(step * batch, (step + 1) * batch)))
            print(f"{name}: {batch * length / seconds / 1e6:.1f} million tokens a second of CPU")
        rows = packed.rows(np.arange(len(packed)))
        full = np.mean((rows.labels != -100) | (rows.positions == 0))
        print(f"packed: {full:.3f} of a row is documents, on average")

        def resume(_: int) -> object:
            again = Packed(file, length, seed=0)
            return again.rows(np.arange(len(packed) - 1, len(packed)))

        seconds = cpu(resume, repeats=5)
        each = seconds / len(file) * 1e6
        print(f"packed: {seconds:.2f} s to go on after {len(file):,} documents, {each:.1f} us each")


if __name__ == "__main__":
    main()
