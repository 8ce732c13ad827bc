"""Plan: what a batch needs in every layer, as tensors on the device of the model.

All integers of a batch go to the device in one copy; masks and angles are made there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smollm2.backends.groups import Group, groups_of
from smollm2.backends.rotary import rotary_tables
from smollm2.backends.torch.cache import TorchCache
from smollm2.batch import Batch
from smollm2.config import Config


@dataclass(frozen=True, slots=True)
class Part:
    """N sequences of Q queries and S keys that attend side by side.

    - ``queries`` [N·Q]: tokens of the batch (None: all of them, in their order)
    - ``keys`` [N·S]: places in the storage, its pages laid end to end, or tokens of the batch
    - ``page``: in place of ``keys``: the first of N pages whose first S places they are; without
      a cache, the keys are all tokens of the batch
    - ``mask`` [N, 1, Q, S]: which keys a query sees (None: all, or those before it if ``causal``)
    """

    count: int
    queries: Tensor | None
    keys: Tensor | None
    length: int
    page: int
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One batch: what goes in, who sees whom, what is wanted.

    - ``ids`` [T], ``wanted`` [W]
    - ``cos`` [T, 1, D]: cosines, of both halves; ``sin``: sines, negative in the first half
    - ``slots`` [T]: where in the storage a token's key and value go
    - ``places`` [T]: finds each token among the results of all parts (None: in their order)
    """

    ids: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    parts: tuple[Part, ...]
    places: Tensor | None
    wanted: Tensor
    cache: TorchCache | None


class Planner:
    """Makes plans. Angles are made once for each position and stay on the device."""

    def __init__(self, config: Config, device: torch.device, angles: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._angles = torch.empty((0, 2, config.head_dim), dtype=angles, device=device)

    def plan(self, batch: Batch, cache: TorchCache | None) -> Plan:
        """What ``batch`` needs; ``cache`` has room for it."""
        packed = _Packed()
        groups = groups_of(batch, cached=cache is not None)
        slots = packed.add(batch.slots if cache is None else cache.places(batch.slots))
        ids, wanted = packed.add(batch.ids), packed.add(batch.wanted)
        positions = packed.add(batch.positions)
        whole = groups.places is None and len(groups.parts) == 1
        places = None if groups.places is None else packed.add(groups.places)
        drafts = [_Draft(group, cache, packed, whole=whole) for group in groups.parts]
        numbers = packed.send(self._device)
        angles = self._table(int(batch.positions.max()) + 1)[numbers[positions]]
        return Plan(
            ids=numbers[ids],
            cos=angles[:, :1],
            sin=angles[:, 1:],
            slots=numbers[slots],
            parts=tuple(draft.part(numbers) for draft in drafts),
            places=None if places is None else numbers[places],
            wanted=numbers[wanted],
            cache=cache,
        )

    def _table(self, length: int) -> Tensor:
        """Cosines and signed sines of positions from 0 to ``length`` and more, [≥ length, 2, D]."""
        if length > len(self._angles):
            positions = np.arange(max(length, 2 * len(self._angles), 512))
            cos, sin = (torch.from_numpy(table) for table in rotary_tables(self._config, positions))
            both = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
            self._angles = both.to(self._angles)
        return self._angles


class _Packed:
    """Arrays of integers, laid end to end so that one copy brings all of them to a device."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.int32]] = []
        self._size = 0

    def add(self, array: NDArray[np.int32]) -> slice:
        """Take an array, of any shape; returns where its numbers will be."""
        start = self._size
        self._arrays.append(array.reshape(-1))
        self._size += array.size
        return slice(start, self._size)

    def send(self, device: torch.device) -> Tensor:
        """All numbers, int64, since that is what torch indexes with."""
        numbers = np.concatenate(self._arrays, dtype=np.int64)
        return torch.from_numpy(numbers).to(device, non_blocking=True)


class _Draft:
    """A part whose integers are on the way to the device."""

    def __init__(
        self, group: Group, cache: TorchCache | None, packed: _Packed, *, whole: bool
    ) -> None:
        self._group = group
        self._queries = None if whole else packed.add(group.queries)
        if cache is None:
            keys, self._page = group.keys, 0 if whole and len(group.keys) == 1 else None
        else:
            keys, self._page = cache.places(group.keys), _first_page(group)
        self._keys = packed.add(keys) if self._page is None else None
        self._masks = None
        if not (group.causal or group.full):
            self._masks = packed.add(group.query_positions), packed.add(group.key_positions)

    def part(self, numbers: Tensor) -> Part:
        count, queries = self._group.queries.shape
        length = self._group.keys.shape[1]
        mask = None
        if self._masks is not None:
            query, key = (numbers[place] for place in self._masks)
            mask = key.view(count, 1, 1, length) <= query.view(count, 1, queries, 1)
        return Part(
            count=count,
            queries=None if self._queries is None else numbers[self._queries],
            keys=None if self._keys is None else numbers[self._keys],
            length=length,
            page=self._page or 0,
            mask=mask,
            causal=self._group.causal,
        )


def _first_page(group: Group) -> int | None:
    """The first of the pages that hold a group's keys, if these lie one after the other."""
    if group.pages is None:
        return None
    first: int = group.pages.item(0)
    following = np.array_equal(group.pages, np.arange(first, first + len(group.pages)))
    return first if following else None
