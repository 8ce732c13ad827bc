"""How fast attention over cached keys and values is on one core, in cycles.

    python benchmarks/attention.py [--isa avx512 avx2] [--kinds int16 int8] [--repeats 20]

For each kind of cache: cycles for one query head and one position, both products and the softmax.
"decode" is one token of 3 query heads that share a kv head (1: every head has its own), "prefill"
64 tokens of 3 heads against 4096 positions, also in multiply-adds a cycle (of head size 64). The
cycles are the core's own, by a chain of multiplications timed in the same run. Each figure is the
fastest of several runs of about 3 ms: other work on the machine only slows.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from smollm2 import _native

PAGE = 64
SIZE = 64
KINDS = ("f32", "int16", "int8")
CASES = {
    "decode 3, 512": (3, 512),
    "decode 3, 4096": (3, 4096),
    "decode 1, 4096": (1, 4096),
    "prefill": (3 * 64, 4096),
}
"""Query rows and positions."""
CHAIN_CYCLES = 3


def seconds(run: Callable[[int], object], repeats: int) -> float:
    """Shortest time of one call, of `run(n)` that calls n times."""
    started = time.perf_counter()
    run(1)
    calls = max(1, int(0.003 / max(time.perf_counter() - started, 1e-6)))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run(calls)
        times.append((time.perf_counter() - started) / calls)
    return min(times)


def cycles_a_second(repeats: int) -> float:
    """The core's clock now."""
    rounds = 100_000
    chain = _native.attention.multiply_chain
    return CHAIN_CYCLES * rounds / seconds(lambda n: chain(n * rounds), repeats)


def filled_blocks(isa: str, kind: str, positions: int) -> NDArray[np.uint8]:
    """Pages of normal numbers, each alike, on lines of the cache."""
    rng = np.random.default_rng(0)
    page = np.zeros((1, _native.attention.kv_block_bytes(kind, SIZE)), dtype=np.uint8)
    for place in range(PAGE):
        key, value = rng.standard_normal((2, SIZE), dtype=np.float32)
        _native.attention.kv_write(isa, kind, page, 0, place, key, value)
    count = positions // PAGE
    memory = np.empty(count * page.size + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    blocks = memory[start : start + count * page.size].reshape(count, -1)
    blocks[:] = page
    return blocks


def measure(isa: str, kind: str, case: str, repeats: int) -> float:
    """Cycles for one row and one position."""
    rows, positions = CASES[case]
    blocks = filled_blocks(isa, kind, positions)
    queries = np.random.default_rng(1).standard_normal((rows, SIZE), dtype=np.float32) / 8
    visible = np.full(rows, positions, dtype=np.int32)

    def run(calls: int) -> object:
        return _native.attention.attend(isa, kind, queries, blocks, visible, calls)

    return seconds(run, repeats) * cycles_a_second(repeats) / (rows * positions)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", nargs="+", default=_native.kernels.isa_names()[::-1])
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}: cycles for one head and position")
    print(f"{'':16}" + "".join(f"{case:>16}" for case in CASES) + f"{'MAC/cycle':>12}")
    for kind in arguments.kinds:
        for isa in arguments.isa:
            cycles = [measure(isa, kind, case, arguments.repeats) for case in CASES]
            print(
                f"{isa + ' ' + kind:16}"
                + "".join(f"{value:16.2f}" for value in cycles)
                + f"{2 * SIZE / cycles[-1]:12.1f}"
            )


if __name__ == "__main__":
    main()
