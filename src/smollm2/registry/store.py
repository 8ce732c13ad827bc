"""The local store: folders of fetched models, each whole and with a manifest, or not there.

The store is ``home()/models``. A copy of a model is a folder of plain files with a
``manifest.json`` that lists the size and SHA-256 of each. It grows in a staging folder, which an
interrupted run leaves for the next one, and gets its place in one step when all of it is there
and checked. So what lies in the store is never half a model. A copy may have a prepared file: one
that was made of the others, and counts as long as they stay as they were. Names are checked by
the registry.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from smollm2.errors import DownloadError, FormatError, InputError
from smollm2.files import sha256_of
from smollm2.registry.manifest import (
    MANIFEST,
    ORIGINS,
    FileRecord,
    Manifest,
    Origin,
    PreparedFile,
    read_manifest,
    write_manifest,
)
from smollm2.registry.progress import Progress


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model of the store: ``nbytes`` on the disk, with its prepared file, where it has one.

    ``problem`` says what keeps a broken one from being used.
    """

    name: str
    path: Path
    source: str
    revision: str
    nbytes: int
    problem: str | None = None
    prepared: Path | None = None


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Whether a file of a model still has the size and SHA-256 it was fetched with."""

    path: Path
    ok: bool
    detail: str


def home() -> Path:
    """The folder for all that is kept: $SMOLLM2_HOME, $XDG_CACHE_HOME/smollm2 or ~/.cache/smollm2.

    Raises ``InputError`` where the user has no home folder and neither variable is set.
    """
    try:
        if chosen := os.environ.get("SMOLLM2_HOME"):
            return Path(chosen).expanduser().absolute()
        if cache := os.environ.get("XDG_CACHE_HOME"):
            return Path(cache).absolute() / "smollm2"
        return Path.home() / ".cache" / "smollm2"
    except RuntimeError:
        raise InputError("there is no home folder: set SMOLLM2_HOME") from None


def root() -> Path:
    """The folder of all models."""
    return home() / "models"


def folder_of(name: str, origin: Origin) -> Path:
    """Where the copy of a model from one origin lies, whether it is there or not.

    Raises ``InputError`` when a name or a link leads out of the store.
    """
    folder = root() / (name.replace("/", "--") + ("" if origin == "hub" else f"+{origin}"))
    if folder.resolve().parent != root().resolve():
        raise InputError(f"the model {name!r:.120} leads out of {root()}: remove {folder}")
    return folder


def find(name: str, origin: Origin) -> Manifest | None:
    """The manifest of a copy that is whole, judged by the sizes of its files."""
    folder = folder_of(name, origin)
    try:
        manifest = read_manifest(folder)
    except FormatError:
        return None
    whole = manifest.name == name and _problem(folder, manifest) is None
    return manifest if whole else None


def list_models() -> list[LocalModel]:
    """The models of the store in the order of their names, broken ones with their ``problem``."""
    try:
        folders = sorted(path for path in root().iterdir() if path.name[0] != ".")
    except FileNotFoundError:
        return []
    return [_describe(folder) for folder in folders if folder.is_dir()]


def check(folder: Path) -> Iterator[FileCheck]:
    """Compare each file of a copy with the size and SHA-256 in its manifest."""
    try:
        manifest = read_manifest(folder)
    except FormatError as error:
        yield FileCheck(folder / MANIFEST, False, str(error))
        return
    for name, record in manifest.files.items():
        path = folder / name
        damage = _wrong_size(path, record) or _wrong_digest(path, record)
        yield FileCheck(path, damage is None, damage or f"sha256 {record.sha256}")


@contextmanager
def locked(name: str, progress: Progress) -> Iterator[None]:
    """Let one process at a time fetch a model; the system frees the lock of one that dies."""
    from filelock import FileLock, Timeout

    folder = root() / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{folder_of(name, 'hub').name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.note(f"another process is fetching {name}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def staging(name: str, origin: Origin, revision: str) -> Path:
    """The folder that a copy grows in, with what an interrupted run left there.

    A broken copy in the store moves there, so that only its damaged files are fetched again.
    """
    final = folder_of(name, origin)
    folder = root() / ".partial" / final.name / revision
    if final.exists() and not folder.exists() and find(name, origin) is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        final.rename(folder)
        (folder / MANIFEST).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_space(folder: Path, needed: int) -> None:
    """Raise ``DownloadError`` unless the disk of ``folder`` has ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{folder} has {free / 1e6:.0f} MB free and {needed / 1e6:.0f} MB are needed: "
            "make room, or set SMOLLM2_HOME to a folder on another disk"
        )


def commit(folder: Path, manifest: Manifest) -> None:
    """Give a staged copy its place in the store, with the files of its manifest and no others."""
    for path in folder.iterdir():
        if path.name not in manifest.files:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_manifest(folder, manifest)
    final = folder_of(manifest.name, manifest.source)
    if final.exists():
        replaced = folder.with_name("replaced")
        if replaced.exists():  # of a run that ended right after the next step
            shutil.rmtree(replaced)
        final.rename(replaced)
    folder.rename(final)
    shutil.rmtree(folder.parent)


def prepared_path(folder: Path, manifest: Manifest) -> Path | None:
    """Where the prepared file of a copy lies, if it is there and was made of what is there now."""
    prepared = manifest.prepared
    if prepared is None:
        return None
    path = folder / prepared.name
    try:
        if path.stat().st_size != prepared.size or changes(folder, manifest) != prepared.sources:
            return None
    except OSError:
        return None
    return path


def prepared_paths(name: str) -> list[Path]:
    """The prepared files of all whole copies of a model."""
    manifests = [manifest for origin in ORIGINS if (manifest := find(name, origin))]
    paths = (prepared_path(folder_of(name, found.source), found) for found in manifests)
    return [path for path in paths if path is not None]


def changes(folder: Path, manifest: Manifest) -> dict[str, int]:
    """When each file of a copy was last changed, in whole seconds as archives keep them."""
    return {name: int((folder / name).stat().st_mtime) for name in manifest.files}


def check_sources(folder: Path, manifest: Manifest) -> None:
    """Raise ``FormatError`` where a file of a copy is not what was fetched."""
    for name, record in manifest.files.items():
        if damage := _wrong_digest(folder / name, record):
            raise FormatError(
                f"{name} {damage}: smollm2 pull --force {manifest.name} fetches it again"
            )


def keep_prepared(
    folder: Path, manifest: Manifest, name: str, sources: Mapping[str, int], recipe: int
) -> Manifest:
    """Note that a file of the folder was made of the others while they were as in ``sources``."""
    prepared = PreparedFile(name, (folder / name).stat().st_size, sources, recipe)
    manifest = replace(manifest, prepared=prepared)
    write_manifest(folder, manifest)
    return manifest


def _wrong_size(path: Path, record: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if size == record.size else f"has {size} bytes instead of {record.size}"


def _wrong_digest(path: Path, record: FileRecord) -> str | None:
    try:
        digest = sha256_of(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if digest == record.sha256 else f"has sha256 {digest} instead of {record.sha256}"


def _problem(folder: Path, manifest: Manifest) -> str | None:
    """The first file that is missing or has another size, and how."""
    for name, record in manifest.files.items():
        if damage := _wrong_size(folder / name, record):
            return f"{name} {damage}"
    return None


def _describe(folder: Path) -> LocalModel:
    """A folder of the store as it is listed."""
    try:
        found = read_manifest(folder)
    except FormatError as error:
        return LocalModel(folder.name, folder, "unknown", "unknown", 0, str(error))
    path = found.entry(folder)
    problem = _problem(folder, found)
    prepared = prepared_path(folder, found)
    nbytes = found.nbytes + (found.prepared.size if found.prepared and prepared else 0)
    return LocalModel(found.name, path, found.source, found.revision, nbytes, problem, prepared)
