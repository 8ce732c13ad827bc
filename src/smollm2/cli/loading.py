"""Loading: a model by name, with a bar on stderr while it is pulled."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from smollm2.cli.options import Computing, Loading
from smollm2.cli.terminal import Terminal

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from smollm2.checkpoint import Checkpoint
    from smollm2.generate import SmolLM2


def load_model(
    loading: Loading, computing: Computing, terminal: Terminal, *, quant: str | None = None
) -> SmolLM2:
    """Load a model; what is not here yet is pulled first, unless ``offline``."""
    from smollm2.generate import load

    given = {**asdict(computing), "quant": quant}
    options: Any = {name: value for name, value in given.items() if value is not None}
    with PullProgress(terminal) as progress:
        return load(loading.model, offline=loading.offline or None, progress=progress, **options)


def fetched(loading: Loading, terminal: Terminal, *, prepare: bool) -> str:
    """Have a model here, so that loading it is no download; returns what to call it."""
    from smollm2.prepared import pull
    from smollm2.registry import local_path

    path = local_path(loading.model)
    if path is not None:
        return path.name
    with PullProgress(terminal) as progress:
        pull(loading.model, offline=loading.offline or None, progress=progress, prepare=prepare)
    return loading.model


def open_checkpoint(name: str, terminal: Terminal, *, offline: bool) -> Checkpoint:
    """Open a checkpoint without making a model of it; pulled first as in ``load_model``."""
    from smollm2.checkpoint import load_checkpoint
    from smollm2.registry import resolve

    with PullProgress(terminal) as progress:
        return load_checkpoint(resolve(name, offline=offline or None, progress=progress))


class PullProgress(AbstractContextManager["PullProgress"]):
    """Shows on stderr how files come: a bar where there is colour, a line a file elsewhere."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bar: Bar | None = None
        self._file = ""

    def note(self, text: str) -> None:
        """Show a remark."""
        self._terminal.note(text)

    def start(self, name: str, total: int | None, verb: str = "fetching") -> None:
        """Show that a file begins, or begins again."""
        again, self._file = name == self._file, name
        if not self._terminal.is_live:
            if not again:
                size = "" if total is None else f" ({size_text(total)})"
                self._terminal.note(f"{verb} {name}{size}")
        elif again and self._bar is not None:
            self._bar.reset(self._bar.task_ids[-1], total=total)
        else:
            if self._bar is None:
                self._bar = _new_bar()
                self._bar.start()
            self._bar.add_task(name, total=total)

    def advance(self, count: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[-1], count)

    def finish(self) -> None:
        """Leave the bar as it is."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def size_text(nbytes: int) -> str:
    """Write a size for people, in decimal units as disks and hubs count: ``98.4 MB``."""
    size, units = float(nbytes), ["B", "kB", "MB", "GB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def format_of(path: Path) -> str:
    """Tell the format of a checkpoint by the names of its files."""
    suffixes = {file.suffix for file in (path.iterdir() if path.is_dir() else [path])}
    return next(
        (name for name in ("safetensors", "gguf", "smol") if f".{name}" in suffixes), "unknown"
    )


def _new_bar() -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )
