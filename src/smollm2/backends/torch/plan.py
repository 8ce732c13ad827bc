"""Plan: what a batch needs in every layer, as tensors on the device of the model.

All integers of a batch go to the device in one copy; masks and angles are made there. What is not
an integer of the batch, its form, says how to read them: batches of one form do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

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
class Rectangle:
    """The form of a part: N sequences (``count``) of Q ``queries`` and S ``keys`` each.

    - ``whole``: the queries are the batch's tokens in their order
    - ``page``: the first of N pages whose first S places hold the keys (None: not on such pages)
    - ``masked``: a mask says which keys a query sees; else all or, if ``causal``, those before it
    """

    count: int
    queries: int
    keys: int
    whole: bool
    page: int | None
    masked: bool
    causal: bool


@dataclass(frozen=True, slots=True)
class Form:
    """What one program can serve: T ``tokens``, W ``wanted``, the parts that attend.

    ``placed``: results of the parts are not in the batch's order.
    """

    tokens: int
    wanted: int
    parts: tuple[Rectangle, ...]
    placed: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle with its numbers; its tensors are None where the form does without.

    - ``queries`` [N·Q]: tokens of the batch
    - ``keys`` [N·S]: places in the storage, its pages laid end to end, or tokens of the batch
    - ``mask`` [N, 1, Q, S]: whether a query sees a key
    """

    form: Rectangle
    queries: Tensor | None
    keys: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """One batch: what goes in, who sees whom, what is wanted.

    - ``ids`` [T], ``wanted`` [W]
    - ``cos`` [T, 1, D]: cosines, of both halves; ``sin``: sines, negative in the first half
    - ``slots`` [T]: where in the storage a token's key and value go
    - ``places`` [T]: finds each token among the results of all parts (None: in their order)
    - ``stored``: keys and values of each layer, [pages, room, K, D] (None: there is no cache)
    """

    ids: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    wanted: Tensor
    places: Tensor | None
    parts: tuple[Part, ...]
    stored: Sequence[tuple[Tensor, Tensor]] | None


def flatten(
    batch: Batch, cache: TorchCache | None, *, few_forms: bool = False
) -> tuple[Form, NDArray[np.int64]]:
    """The form of a batch, and its numbers in the order in which ``Planner.read`` does so.

    ``cache`` has room for the batch. With ``few_forms`` batches that differ in the number of keys
    have the same form, but for powers of two: what is too much is masked.
    """
    room = None if cache is None or cache.layout.paged else cache.room
    fit = (lambda n: _power_of_two(n, room)) if few_forms else None
    groups = groups_of(batch, cached=cache is not None, fit_keys=fit)
    slots = batch.slots if cache is None else cache.places(batch.slots)
    arrays = [batch.ids, batch.positions, slots, batch.wanted]
    if groups.places is not None:
        arrays.append(groups.places)
    whole = groups.places is None and len(groups.parts) == 1
    parts = []
    for group in groups.parts:
        part = _rectangle(group, cache, whole=whole, few_forms=few_forms)
        if not part.whole:
            arrays.append(group.queries)
        if part.page is None:
            arrays.append(group.keys if cache is None else cache.places(group.keys))
        if part.masked:
            arrays += [group.query_positions, group.key_positions]
        parts.append(part)
    form = Form(len(batch), len(batch.wanted), tuple(parts), groups.places is not None)
    # torch indexes with int64
    return form, np.concatenate([array.reshape(-1) for array in arrays], dtype=np.int64)


_GROWING = Lock()
"""Held while angles are made: of all planners, since those of modules are copied and pickled."""


class Planner:
    """Makes plans. Angles are made once for each position and stay on the device."""

    def __init__(self, config: Config, device: torch.device, angles: torch.dtype) -> None:
        self._config = config
        self._angles = torch.empty((0, 2, config.head_dim), dtype=angles, device=device)

    def plan(self, batch: Batch, cache: TorchCache | None) -> Plan:
        """What a batch needs; ``cache`` has room for it."""
        form, numbers = flatten(batch, cache)
        angles = self.reserve(int(batch.positions.max()) + 1)
        return self.read(form, torch.from_numpy(numbers).to(angles.device), angles, cache)

    def read(self, form: Form, numbers: Tensor, angles: Tensor, cache: TorchCache | None) -> Plan:
        """Read the ``numbers`` of a batch, on the device, with angles that it reserved."""
        read = _Reader(numbers)
        ids, positions, slots = (read.next(form.tokens) for _ in range(3))
        wanted = read.next(form.wanted)
        turns = angles[positions]
        return Plan(
            ids=ids,
            cos=turns[:, :1],
            sin=turns[:, 1:],
            slots=slots,
            wanted=wanted,
            places=read.next(form.tokens) if form.placed else None,
            parts=tuple(read.part(part) for part in form.parts),
            stored=None if cache is None else cache.stored,
        )

    def reserve(self, length: int) -> Tensor:
        """Angles for positions below ``length``: cosines, signed sines [≥ length, 2, D]."""
        with _GROWING:
            if length > len(self._angles):
                self._angles = self._made(max(length, 2 * len(self._angles), 512))
            return self._angles

    def _made(self, length: int) -> Tensor:
        cos, sin = map(torch.from_numpy, rotary_tables(self._config, np.arange(length)))
        both = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
        return both.to(self._angles)


class _Reader:
    """Reads numbers in their order."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._read = 0

    def next(self, count: int) -> Tensor:
        """The next ``count`` numbers."""
        start, self._read = self._read, self._read + count
        return self._numbers[start : self._read]

    def part(self, form: Rectangle) -> Part:
        """The next part."""
        n, q, s = form.count, form.queries, form.keys
        queries = None if form.whole else self.next(n * q)
        keys = self.next(n * s) if form.page is None else None
        mask = None
        if form.masked:
            query = self.next(n * q).view(n, 1, q, 1)
            mask = self.next(n * s).view(n, 1, 1, s) <= query
        return Part(form, queries, keys, mask)


def _rectangle(
    group: Group, cache: TorchCache | None, *, whole: bool, few_forms: bool
) -> Rectangle:
    count, queries = group.queries.shape
    masked = few_forms or not (group.causal or group.full)
    if cache is None:
        page = 0 if whole and count == 1 else None
    elif group.pages is None or (few_forms and cache.layout.paged):
        page = None
    else:
        page = _first(group.pages.tolist())
    causal = group.causal and not masked
    return Rectangle(count, queries, group.keys.shape[1], whole, page, masked, causal)


def _power_of_two(n: int, most: int | None) -> int:
    rounded = 1 << (n - 1).bit_length()
    return rounded if most is None else min(rounded, most)


def _first(pages: Sequence[int]) -> int | None:
    """The first of some pages, if they lie one after the other."""
    first = pages[0]
    return first if pages == list(range(first, first + len(pages))) else None
