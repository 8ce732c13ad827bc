"""Files: atomic writes, and JSON that is read strictly."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from smollm2.errors import FormatError, InputError, SmolLM2Error

_JSON_LIMIT = 100_000_000
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def temporary_name() -> str:
    """A name that nothing else has, for what is not complete yet."""
    return f".{os.urandom(8).hex()}.tmp"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under ``path`` only when all of it is on the disk.

    The bytes go to a temporary name in the same folder, are synced, and replace ``path`` in one
    step. If the body raises, the temporary file is deleted and an old file stays as it was.

    Raises ``OSError`` as ``open`` and ``write`` do; errors name ``path``, not the temporary file.
    """
    temporary = path.parent / temporary_name()
    with naming(path, temporary):
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    _sync_folder(path.parent)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Make a folder beside ``path`` for what is not complete yet, and delete it if it is left.

    Errors say ``path`` where they would say the folder.
    """
    from shutil import rmtree

    temporary = path.parent / temporary_name()
    with naming(path, temporary):
        try:
            temporary.mkdir()
            yield temporary
        finally:
            rmtree(temporary, ignore_errors=True)


@contextmanager
def naming(path: Path, temporary: Path) -> Iterator[None]:
    """Within it, errors say ``path`` where they would say ``temporary``, or no name at all."""
    hidden, shown = str(temporary), str(path)
    try:
        yield
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        if error.errno is None or (names and not any(hidden in name for name in names)):
            raise
        said = names[0].replace(hidden, shown) if names else shown
        raise OSError(error.errno, error.strerror, said) from None
    except SmolLM2Error as error:
        if hidden not in str(error):
            raise
        raise type(error)(str(error).replace(hidden, shown)) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises ``FormatError`` for whatever cannot be read, is larger than 100 MB, or is not what
    ``parse_json`` takes.
    """
    if not os.path.isfile(path):
        raise FormatError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            raw = file.read(_JSON_LIMIT + 1)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if len(raw) > _JSON_LIMIT:
        raise FormatError(f"{path}: the file is larger than {_JSON_LIMIT} bytes of JSON")
    return parse_json(raw, str(path))


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``raw``; ``where`` names it in errors.

    Raises ``FormatError`` for bad UTF-8, bad JSON, a key that appears twice in one object,
    numbers that are not finite, lone surrogates, nesting too deep for the interpreter, and for
    anything but an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise FormatError(f"{where}: the key {twice!r:.80} appears twice in one object")
        return value

    def refuse(constant: str) -> NoReturn:
        raise FormatError(f"{where}: {constant} is not JSON")

    def finite(digits: str) -> float:
        number = float(digits)
        if not math.isfinite(number):
            raise FormatError(f"{where}: the number {digits:.80} is out of range")
        return number

    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=refuse,
            parse_float=finite,
        )
        if _MAYBE_SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise FormatError(f"{where}: not UTF-8: {error.reason}") from None
    except ValueError as error:
        raise FormatError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise FormatError(f"{where}: JSON nested too deep") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where}: a JSON object is needed, not a {type(value).__name__}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented UTF-8 JSON, atomically.

    Raises ``InputError`` for a value that JSON cannot hold, before anything is written.
    """
    try:
        raw = json_bytes(value)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    with atomic_write(path) as file:
        file.write(raw)


def json_bytes(value: Any) -> bytes:
    """A value as indented UTF-8 JSON. Raises ``InputError`` for one that JSON cannot hold."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        return f"{text}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"not a JSON value: {error}") from None


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a crash, where the system lets folders be synced."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
