"""The way from a process's start to its first token: what is on it, and what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smollm2.checkpoint import load_checkpoint
from smollm2.export import export_smol
from smollm2.opening import open_path
from tests.cli_session import write_model

NOT_NEEDED = {
    "filelock",
    "hashlib",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "ml_dtypes",
    "numpy.ma",
    "numpy.random",
    "pydantic",
    "rich",
    "secrets",
    "smollm2.backends.numpy",
    "smollm2.evaluate",
    "smollm2.export",
    "smollm2.formats.dart",
    "smollm2.registry.download",
    "smollm2.registry.wheel",
    "ssl",
    "zipfile",
}
"""Each takes from two to seventy thousandths of a second to import."""

LOADED = "print('\\n', *sorted(sys.modules))"


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("startup")
    export_smol(load_checkpoint(write_model(folder / "model")), folder / "x.smol", quant="q8")
    return folder / "x.smol"


def modules(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\n{LOADED}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.rpartition("\n ")[2].split())


def test_a_run_imports_what_it_needs_and_no_more(smol: Path) -> None:
    """cases: P5, wish 15"""
    arguments = ["run", "-m", str(smol), "-p", "Th", "-n", "2"]
    loaded = modules(f"from smollm2.cli import main\nassert main({arguments!r}) == 0")
    assert {"numpy", "tokenizers", "smollm2._native", "smollm2.generate"} <= loaded
    assert loaded & NOT_NEEDED == set()


def test_the_collector_is_told_that_a_start_makes_no_garbage() -> None:
    program = "import gc\nfrom smollm2.__main__ import main\nsys.argv[1:] = ['--version']\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\nprint(gc.get_threshold()[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout.splitlines()[-1]) >= 100_000


def test_opening_takes_one_step_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of a config are made once, not once for each tensor of a file."""
    from smollm2.config import Config

    asked = []
    shapes = Config.shapes.fget
    assert shapes is not None

    def counting(config: Config) -> dict[str, tuple[int, ...]]:
        asked.append(config)
        made: dict[str, tuple[int, ...]] = shapes(config)
        return made

    path = tmp_path / "x.smol"
    export_smol(load_checkpoint(write_model(tmp_path / "model", num_hidden_layers=9)), path)
    monkeypatch.setattr(Config, "shapes", property(counting))
    open_path(path)
    assert len(asked) == 1
