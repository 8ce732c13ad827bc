"""The manifest of a copy of a model: where it is from, what it is made of, how it is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from smollm2.errors import FormatError
from smollm2.files import read_json, write_json

Origin = Literal["hub", "pypi"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)

MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size in bytes and the SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PreparedFile:
    """A file that was made of the others of a copy: its name and its size in bytes.

    ``sources`` has the times of the last change of those, in whole seconds; ``recipe`` is a number
    for how it was made, 0 where that was not noted yet.
    """

    name: str
    size: int
    sources: Mapping[str, int]
    recipe: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a copy of a model is: its origin and its files, and what was prepared of them.

    ``repo`` and ``revision`` are a hub's repository and commit, or a package and its version.
    """

    name: str
    source: Origin
    repo: str
    revision: str
    files: Mapping[str, FileRecord]
    prepared: PreparedFile | None = None

    @property
    def nbytes(self) -> int:
        """The size of all files that were fetched, in bytes."""
        return sum(record.size for record in self.files.values())

    def entry(self, folder: Path) -> Path:
        """What is opened: the file of a model that is one file, or the folder."""
        names = list(self.files)
        return folder / names[0] if len(names) == 1 else folder


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest into the folder of a copy, atomically."""
    found = asdict(manifest)
    if manifest.prepared is None:
        del found["prepared"]
    write_json(folder / MANIFEST, found)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises ``FormatError`` where it has none."""
    path = folder / MANIFEST
    found = read_json(path)
    try:
        files = {
            name: FileRecord(record["size"], record["sha256"])
            for name, record in found["files"].items()
        }
        texts = [found[key] for key in ("name", "source", "repo", "revision")]
    except (AttributeError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is not a manifest: {error}") from None
    texts += [record.sha256 for record in files.values()]
    if (
        not files
        or found["source"] not in ORIGINS
        or not all(isinstance(text, str) for text in texts)
        or not all(isinstance(record.size, int) for record in files.values())
        or not all(_FILE_NAME.fullmatch(name) for name in files)
    ):
        raise FormatError(f"{path} is not a manifest: a value has the wrong form")
    prepared = _read_prepared(found.get("prepared"))
    return Manifest(
        found["name"], found["source"], found["repo"], found["revision"], files, prepared
    )


def _read_prepared(found: Any) -> PreparedFile | None:
    """What a manifest says of a prepared file, None where that is nothing one can use."""
    try:
        prepared = PreparedFile(
            found["name"], found["size"], found["sources"], found.get("recipe", 0)
        )
        usable = _FILE_NAME.fullmatch(prepared.name) and isinstance(prepared.sources, dict)
    except (KeyError, TypeError):
        return None
    return prepared if usable else None
