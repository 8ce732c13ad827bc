"""Remote: whether a model of a hub fits its config, known without fetching its weights."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from smollm2.checkpoint import load_checkpoint
from smollm2.errors import OfflineError
from smollm2.files import naming
from smollm2.formats.safetensors import HEADER_LIMIT
from smollm2.registry.download import Hub, RemoteFile, Snapshot
from smollm2.registry.models import is_offline, source_of
from smollm2.registry.progress import Progress, SilentProgress

_FIRST = 2**18
"""Bytes of a weights file that are asked for first: the header of some thousand tensors."""


def check_hub(
    name: str, *, offline: bool | None = None, progress: Progress | None = None
) -> Snapshot:
    """Check a model as its hub has it now, and return which files those are.

    The names, shapes and dtypes of its tensors must be those that its config asks for, as
    ``load_checkpoint`` demands, and the tokenizer and its template must be sound. Of weights only
    the headers are fetched; nothing is stored. ``offline`` and ``progress`` are those of ``pull``.

    Raises as ``pull`` and ``load_checkpoint`` do.
    """
    source = source_of(name)
    if is_offline(offline):
        raise OfflineError(
            f"{name} is on a hub and the network is switched off: unset SMOLLM2_OFFLINE and "
            "HF_HUB_OFFLINE, or check what was pulled"
        )
    hub = Hub.from_environment()
    snapshot = hub.snapshot(source.repo, source.revision)
    with TemporaryDirectory(prefix="smollm2-", ignore_cleanup_errors=True) as name_of_folder:
        folder = Path(name_of_folder)
        for file in snapshot.files:
            if file.name.endswith(".safetensors"):
                _put_header(hub, snapshot, file, folder)
            else:
                hub.fetch(snapshot, file, folder, progress or SilentProgress())
        with naming(Path(f"{snapshot.repo}@{snapshot.commit}"), folder):
            load_checkpoint(folder)
    return snapshot


def _put_header(hub: Hub, snapshot: Snapshot, file: RemoteFile, folder: Path) -> None:
    """Write a weights file that has a hole in the place of its tensors."""
    data = hub.beginning(snapshot, file, _FIRST)
    needed = 8 + int.from_bytes(data[:8], "little")
    if len(data) < needed <= min(file.size, HEADER_LIMIT):
        data = hub.beginning(snapshot, file, needed)
    with (folder / file.name).open("wb") as out:
        out.write(data[:needed])
        out.truncate(file.size)
