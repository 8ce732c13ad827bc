from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

# Single kernels, for tests and benchmarks.
kernels: Any
attention: Any

def cpu_features() -> list[str]: ...
def pack(
    data: NDArray[np.uint8],
    row_kind: str,
    cols: int,
    kind: str,
    row_order: NDArray[np.int32] | None = None,
    threads: int = 1,
    importance: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]: ...
def fits_bf16(data: NDArray[np.uint8], row_kind: str, cols: int) -> bool: ...
def packed_bytes(kind: str, rows: int, cols: int) -> int: ...
def unpack(packed: NDArray[np.uint8], kind: str, rows: int, cols: int) -> NDArray[np.float32]: ...
def dart_hashes(values: NDArray[np.uint8], kind: str) -> tuple[int, int]: ...
def memory(size: int) -> NDArray[np.uint8]: ...
def cores(cpus: Sequence[int], root: str) -> int: ...
def available_cores() -> int: ...
def probe(threads: int = 0) -> Limits: ...

@final
class Limits:
    @property
    def read_gb_s(self) -> float: ...
    @property
    def dot_gmac_s(self) -> float: ...

@final
class Threads:
    def __init__(self, count: int) -> None: ...
    @property
    def count(self) -> int: ...
    def run(self, work: Callable[[int], object]) -> None: ...
    def run_phases(self, phases: int, work: Callable[[int, int], object]) -> None: ...

@final
class KvCache:
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...

@final
class Engine:
    def __init__(
        self,
        numbers: Mapping[str, int],
        epsilon: float,
        matrices: Sequence[tuple[str, int, int, NDArray[np.uint8]]],
        gains: Sequence[NDArray[np.float32]],
        threads: int = 0,
        isa: str = "",
    ) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    def new_cache(self, kind: str, pages: int) -> KvCache: ...
    def forward(
        self,
        cache: KvCache,
        ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        cosines: NDArray[np.float32],
        sines: NDArray[np.float32],
        runs: NDArray[np.int32],
        pages: NDArray[np.int32],
        wanted: NDArray[np.int32],
    ) -> NDArray[np.float32]: ...
    def hidden(
        self,
        cache: KvCache,
        ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        cosines: NDArray[np.float32],
        sines: NDArray[np.float32],
        runs: NDArray[np.int32],
        pages: NDArray[np.int32],
        wanted: NDArray[np.int32],
    ) -> NDArray[np.float32]: ...
    def profile(self, enabled: bool) -> dict[str, tuple[float, float]]: ...
