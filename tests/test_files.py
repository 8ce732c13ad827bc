"""Atomic writes and strict JSON, compared with what is left on the disk and with ``json``."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from smollm2.errors import FormatError, InputError
from smollm2.files import atomic_write, parse_json, read_json, temporary_folder, write_json

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)
HOSTILE_JSON = {
    b"": "not JSON",
    b"{": "not JSON",
    b"{} x": "not JSON",
    b"\xef\xbb\xbf{}": "not JSON",
    b"{'a': 1}": "not JSON",
    b'{"a": "\xff"}': "not UTF-8",
    '{"a": 1}'.encode("utf-16"): "not UTF-8",
    b'{"a": "\\ud800"}': "not UTF-8",
    b'{"\\uDFFF": 1}': "not UTF-8",
    b'{"a": 1, "a": 1}': "'a' appears twice",
    b'{"o": [{"x": {"b": 1, "c": 2, "b": 3}}]}': "'b' appears twice",
    b'{"a": NaN}': "NaN is not JSON",
    b'{"a": [-Infinity]}': "-Infinity is not JSON",
    b'{"a": 1e999}': "the number 1e999 is out of range",
    b'{"a": 1' + b"0" * 5000 + b"}": "not JSON",
    b'{"a": ' + b"[" * 200_000: "nested too deep",
    b'{"a":' * 200_000: "nested too deep",
    b"[]": "a JSON object is needed, not a list",
    b"3": "a JSON object is needed, not a int",
    b"null": "a JSON object is needed, not a NoneType",
}


# cases: W12, D2
def test_an_atomic_write_replaces_the_old_file_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file.bin"]


# cases: W12
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail(path: Path) -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise error

    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    for target in (path, tmp_path / "other.bin"):
        with pytest.raises(error):
            fail(target)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


# cases: W12
def test_errors_say_what_was_to_be_written(tmp_path: Path) -> None:
    """Not the temporary names, of files, of folders and of what lies in those; nor other files."""
    path = tmp_path / "x"
    with (
        pytest.raises(OSError, match=rf"No space left on device: '{path}/y'$"),
        temporary_folder(path) as folder,
        atomic_write(folder / "y"),
    ):
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match=r"Is a directory: 'other'$"), atomic_write(path):
        raise OSError(21, "Is a directory", "other")
    with (
        pytest.raises(FormatError, match=rf"^{path}: is broken$"),
        temporary_folder(path) as folder,
    ):
        raise FormatError(f"{folder}: is broken")
    with pytest.raises(FormatError, match=rf"^{path}: is broken$"), atomic_write(path) as file:
        raise FormatError(f"{file.name}: is broken")
    with pytest.raises(OSError, match=rf"'{path}/no'$"), temporary_folder(path) as folder:
        (folder / "no").replace(tmp_path / "there")
    with pytest.raises(OSError, match=rf"'{path}/y/x'$"), atomic_write(path / "y" / "x"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_folder_that_was_renamed_stays(tmp_path: Path) -> None:
    with temporary_folder(tmp_path / "x") as folder:
        (folder / "y").write_text("whole")
        folder.replace(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    assert os.listdir(tmp_path / "x") == ["y"]


def test_a_file_and_its_folder_are_synced_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.bin"
    synced: list[tuple[bool, bool]] = []

    def fsync(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(path) as file:
        file.write(b"x")
    assert synced == ([(False, False), (True, True)] if os.name == "posix" else [(False, False)])


def test_a_name_as_long_as_the_system_allows_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    with atomic_write(path) as file:
        file.write(b"x")
    assert path.read_bytes() == b"x"


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_new_file_gets_the_permissions_that_the_user_has_set(tmp_path: Path) -> None:
    write_json(tmp_path / "ours.json", {})
    (tmp_path / "plain.json").write_bytes(b"")
    assert (tmp_path / "ours.json").stat().st_mode == (tmp_path / "plain.json").stat().st_mode


@pytest.mark.parametrize(("raw", "message"), HOSTILE_JSON.items(), ids=list(HOSTILE_JSON.values()))
def test_json_that_is_not_an_object_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(FormatError) as caught:
        read_json(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300 + len(str(path))


def test_nesting_is_refused_however_little_stack_is_left() -> None:
    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
        else:
            with pytest.raises(FormatError):
                parse_json(b'{"a": ' + b"[" * 5000, "here")

    deeper(sys.getrecursionlimit() // 2)


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe", Path("a\0b")):
        with pytest.raises(FormatError, match="no such file"):
            read_json(path)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": 1}')
    monkeypatch.setattr("smollm2.files._JSON_LIMIT", 8)
    assert read_json(path) == {"a": 1}
    monkeypatch.setattr("smollm2.files._JSON_LIMIT", 7)
    with pytest.raises(FormatError, match="larger than 7 bytes"):
        read_json(path)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), JSON))
def test_any_object_is_read_as_the_standard_library_wrote_it(value: dict[str, object]) -> None:
    for ascii_only in (True, False):
        raw = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert parse_json(raw, "here") == value


@given(st.binary() | st.text('{}[]",:\\u0d8eE1.+-').map(str.encode))
def test_any_bytes_are_an_object_or_a_format_error(raw: bytes) -> None:
    try:
        value = parse_json(raw, "here")
    except FormatError:
        return
    assert value == json.loads(raw)


def test_written_json_is_readable_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"model_type": "llama", "eos": ["é", None]})
    expected = '{\n  "model_type": "llama",\n  "eos": [\n    "é",\n    null\n  ]\n}\n'
    assert path.read_text("utf-8") == expected
    assert read_json(path) == {"model_type": "llama", "eos": ["é", None]}


@pytest.mark.parametrize("value", [{"a": float("nan")}, {"a": {1}}, {"a": "\ud800"}])
def test_what_json_cannot_hold_is_refused_and_nothing_written(
    tmp_path: Path, value: object
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    with pytest.raises(InputError, match="not a JSON value"):
        write_json(path, value)
    circular: list[object] = []
    circular.append(circular)
    with pytest.raises(InputError, match="not a JSON value"):
        write_json(path, circular)
    assert path.read_bytes() == b"old"
