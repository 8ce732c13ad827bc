"""Which backend computes where nobody says: native, or NumPy and a warning."""

from __future__ import annotations

import sys
import tomllib
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import smollm2
from smollm2.backends import default_backend, get_backend
from smollm2.backends.native import NativeModel
from smollm2.backends.numpy import NumpyModel
from smollm2.cli import main
from smollm2.errors import InputError, MissingDependencyError
from tests import installed
from tests.cli_session import Screen, run_cli, write_model
from tests.conftest import REPOSITORY

LEAST = {"torch": (2, 9), "jax": (0, 6)}
WITHOUT = "import sys; sys.modules['smollm2._native'] = None\n"
"""Makes a process one where the extension is not installed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("default") / "model")


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smollm2._native", None)


def test_what_each_wheel_is_asked_holds_here() -> None:
    installed.main()


def test_native_by_default(model: Path) -> None:
    assert default_backend() == "native"
    with smollm2.load(model) as loaded:
        assert isinstance(loaded.lm, NativeModel)
        assert loaded.lm.kinds == {"q8"}
    with smollm2.load(model, backend="numpy") as loaded:
        assert isinstance(loaded.lm, NumpyModel)


@pytest.mark.usefixtures("no_extension")
def test_numpy_with_a_warning_where_the_extension_is_missing(model: Path) -> None:
    """cases: I1"""
    with pytest.warns(RuntimeWarning, match=r"native engine is not here .*: NumPy computes") as got:
        loaded = smollm2.load(model)
    assert isinstance(loaded.lm, NumpyModel)
    assert len(got) == 1
    assert "\n" not in str(got[0].message)
    assert loaded.generate("Th", max_tokens=3).text


@pytest.mark.usefixtures("no_extension")
def test_it_warns_once(model: Path) -> None:
    with warnings.catch_warnings(record=True) as got:
        warnings.resetwarnings()
        for _ in range(3):
            assert default_backend() == "numpy"
    assert len(got) == 1


@pytest.mark.usefixtures("no_extension")
def test_native_by_name_is_an_error_where_the_extension_is_missing(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MissingDependencyError, match=r"backend='native' needs .*backend='numpy'"):
        smollm2.load(model, backend="native")
    assert main(["bench", "-m", str(model), "--backend", "native"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: backend='native' needs the extension")
    assert get_backend("numpy")


EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize(("name", "title"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_a_framework_that_is_too_old_is_named(
    name: str, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with both versions; the least one is that of pyproject.toml, in all extras."""
    pytest.importorskip(name)
    for extra in (name, "export"):
        assert f"{name}>={'.'.join(map(str, LEAST[name]))}" in EXTRAS[extra]
    major, minor = LEAST[name]
    for version in (f"{major}.{minor - 1}.1+cpu", f"{major - 1}.99rc1" if major else "0.0.1"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        with pytest.raises(MissingDependencyError) as error:
            get_backend(name)
        assert str(error.value) == (
            f"backend={name!r} needs {title} {major}.{minor} or later, but {version} is "
            f"installed: pip install 'smollm2[{name}]'"
        )
    for version in (f"{major}.{minor}.0a0+git12", f"{major}.{minor + 7}", f"{major + 1}.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        assert get_backend(name)

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    assert get_backend(name)


@pytest.mark.usefixtures("no_extension")
def test_options_of_the_native_backend_are_not_ignored(model: Path) -> None:
    """cases: N7"""
    with (
        pytest.warns(RuntimeWarning, match="NumPy computes"),
        pytest.raises(InputError, match="quant"),
    ):
        smollm2.load(model, quant="q8")


def test_the_command_line_says_it_in_one_line(model: Path) -> None:
    """cases: I1"""
    arguments = ["run", "-m", str(model), "Th", "-n", "3"]
    program = f"{WITHOUT}from smollm2.cli import main\nsys.exit(main({arguments!r}))"
    with Screen("-c", program, command=[sys.executable], NO_COLOR="1", columns=200) as screen:
        assert screen.exit_code() == 0
        said = [line for line in screen.lines if line.startswith("warning: ")]
    assert len(said) == 1
    assert "NumPy computes instead" in said[0]
    done = run_cli("run", "-m", model, "Th", "-n", "3")
    assert (done.returncode, "warning" in done.stderr) == (0, False)


def test_bench_names_what_computed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--prompt", "8", "--decode", "2", "--repeats", "1", "--json"]
    for options, engine in ([], "native"), (["--backend", "numpy"], "numpy"):
        assert main(["bench", "-m", str(model), *work, *options]) == 0
        assert f'"engine": "smollm2 {engine}"' in capsys.readouterr().out
