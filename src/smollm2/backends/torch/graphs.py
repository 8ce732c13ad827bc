"""Graphs: steps of decode captured as CUDA graphs, so that the CPU launches one thing a step.

A graph has the addresses of all tensors in it: it belongs to one form of batches and to a cache as
long as that does not grow. What changes between replays, the integers of a batch, is copied into
the tensor that the graph reads them from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from smollm2.backends.torch.cache import TorchCache
from smollm2.backends.torch.plan import Form, Plan, Planner, flatten
from smollm2.batch import Batch

MOST_GRAPHS = 32
"""Graphs of a cache; the one that was not used for longest goes first."""

WARMUPS = 2
"""Passes before a capture, in which libraries allocate what they keep."""

_CAPTURING = Lock()
"""Held during captures, of all models: torch has one stream for them, and the device must not be
waited for meanwhile."""

Run = Callable[[Plan], Tensor]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    result: Tensor


class _OfCache:
    """Graphs over one state of a cache's storage."""

    def __init__(self, storage: Tensor) -> None:
        self.storage = ref(storage)
        self.graphs: OrderedDict[Hashable, _Captured] = OrderedDict()


class Graphs:
    """Runs steps over caches by replaying them, after a first time for each form."""

    def __init__(self, planner: Planner, context_length: int) -> None:
        self._planner = planner
        self._context_length = context_length
        self._caches: WeakKeyDictionary[TorchCache, _OfCache] = WeakKeyDictionary()

    def __call__(self, run: Run, name: str, batch: Batch, cache: TorchCache) -> Tensor:
        """``run`` of a batch's plan; ``name`` tells runs apart. The next call writes to the result.

        ``cache`` has room for the batch.
        """
        with torch.cuda.device(cache.stored[0][0].device):
            return self._replayed(run, name, batch, cache)

    def _replayed(self, run: Run, name: str, batch: Batch, cache: TorchCache) -> Tensor:
        form, values = flatten(batch, cache, few_forms=True)
        numbers = torch.from_numpy(values)
        known = self._caches.get(cache)
        storage = cache.stored[0][0]
        if known is None or known.storage() is not storage:
            known = self._caches[cache] = _OfCache(storage)
        captured = known.graphs.get((name, form))
        if captured is None:
            captured = self._capture(run, form, numbers, cache)
            known.graphs[name, form] = captured
            if len(known.graphs) > MOST_GRAPHS:
                known.graphs.popitem(last=False)
        known.graphs.move_to_end((name, form))
        captured.numbers.copy_(numbers, non_blocking=True)
        captured.graph.replay()
        return captured.result

    def clear(self) -> None:
        """Let go of all graphs, and of the weights that are in them."""
        self._caches.clear()

    def _capture(self, run: Run, form: Form, numbers: Tensor, cache: TorchCache) -> _Captured:
        """A step as a graph. Running it writes the batch's keys, once more each time."""
        angles = self._planner.reserve(self._context_length)
        static = numbers.to(cache.stored[0][0].device)
        with _CAPTURING:
            for _ in range(WARMUPS):
                run(self._planner.read(form, static, angles, cache))
            torch.cuda.synchronize(static.device)
            graph = torch.cuda.CUDAGraph()
            # What other threads do meanwhile, as to allocate, is none of its business.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = run(self._planner.read(form, static, angles, cache))
        return _Captured(graph, static, result)
