"""How fast single linear kernels are on one core, beside what the core can do.

    python benchmarks/kernels.py [--isa avx512] [--kinds q8 q4] [--rows 1 4 64] [--repeats 20]

For each kind of weight and number of rows of activations: multiply-adds a second (and their share
of the 8-bit dot products that the core does) and bytes of weights a second. "stream" is a matrix
too large for any cache; its bytes also come as a share of what the core reads from memory. Both
limits are measured in the same run (of the best instruction set). Each figure is the best of
several runs of about 3 ms: other work on the machine only slows.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from smollm2 import _native

SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate-up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
    "stream": (0, 576),
}
"""Outputs and inputs of 135M's stacked linears; "stream" has as many rows as fill 160 MB."""
STREAM_BYTES = 160_000_000
PROBES = 5
MOST_STREAMED = 8
"""Rows beyond which a stream says nothing new."""
INTEGER = ("q8", "q4", "q4m")


def seconds(run: Callable[[int], object], repeats: int) -> float:
    """Shortest time of one call, of `run(n)` that calls n times: what neighbours disturb least."""
    started = time.perf_counter()
    run(1)
    once = time.perf_counter() - started
    calls = max(1, int(0.003 / max(once, 1e-6)))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run(calls)
        times.append((time.perf_counter() - started) / calls)
    return min(times)


def packed(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """A float32 matrix as tiles."""
    data = values.view(np.uint8).reshape(len(values), -1)
    result: NDArray[np.uint8] = _native.pack(data, "F32", values.shape[1], kind, None, 2)
    return result


def matrix(kind: str, shape: str, rng: np.random.Generator) -> tuple[NDArray[np.uint8], int, int]:
    """Packed weights, their rows and columns. A long matrix repeats its first rows."""
    rows, cols = SHAPES[shape]
    if shape == "stream":
        rows = STREAM_BYTES // _native.packed_bytes(kind, 16, cols) * 16
    own = min(rows, 4096)
    tiles = packed(rng.standard_normal((own, cols), dtype=np.float32), kind)
    data = np.resize(tiles.reshape(own // 16, -1), (rows // 16, tiles.size * 16 // own))
    aligned = np.empty(data.size + 64, dtype=np.uint8)
    start = -aligned.ctypes.data % 64
    aligned[start : start + data.size] = data.reshape(-1)
    return aligned[start : start + data.size], rows, cols


def kernel_of(
    isa: str, kind: str, weights: tuple[NDArray[np.uint8], int, int], m: int
) -> Callable[[int], object]:
    """A function that calls the kernel n times."""
    data, rows, cols = weights
    padded = -(-cols // 64) * 64
    x = np.random.default_rng(1).standard_normal((m, padded), dtype=np.float32)
    out = np.empty((m, rows), dtype=np.float32)
    kernels = _native.kernels
    if kind not in INTEGER:
        return lambda n: kernels.linear_float(isa, data, kind, cols, x, out, repeats=n)
    quantized = kernels.quantize(isa, x)
    return lambda n: kernels.linear_integer(isa, data, kind, cols, quantized, out, repeats=n)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", default=_native.kernels.chosen())
    parser.add_argument("--kinds", nargs="+", default=["f32", "bf16", "q16", "q8", "q4", "q4m"])
    parser.add_argument("--shapes", nargs="+", default=["qkv", "gate-up", "down", "stream"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 64, 512])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    probes = [_native.probe(threads=1) for _ in range(PROBES)]
    most_dots = max(probe.dot_gmac_s for probe in probes)
    most_read = max(probe.read_gb_s for probe in probes)
    print(
        f"{platform.machine()}, {arguments.isa}, one core: {most_dots:.0f} GMAC/s of 8-bit dot "
        f"products, {most_read:.1f} GB/s read from memory"
    )
    print(f"{'kind':<5} {'shape':<8} {'rows':>4} {'GMAC/s':>7} {'of dots':>7} {'GB/s':>6} of read")
    rng = np.random.default_rng(0)
    for kind in arguments.kinds:
        for shape in arguments.shapes:
            weights = matrix(kind, shape, rng)
            for m in arguments.rows:
                if shape == "stream" and m > MOST_STREAMED:
                    continue
                took = seconds(kernel_of(arguments.isa, kind, weights, m), arguments.repeats)
                rate = m * weights[1] * weights[2] / took / 1e9
                read = weights[0].size / took / 1e9
                share = f"{read / most_read:7.0%}" if shape == "stream" else ""
                print(
                    f"{kind:<5} {shape:<8} {m:>4} {rate:7.1f} {rate / most_dots:7.0%} "
                    f"{read:6.1f} {share}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
