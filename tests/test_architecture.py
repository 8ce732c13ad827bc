"""What the project holds itself to, counted: sizes, docstrings, imports, names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import smollm2
from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "src" / "smollm2"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION, MOST_PUBLIC_NAMES = 350, 60, 25
HEAVY = {"torch", "jax", "huggingface_hub", "jinja2", "rich", "transformers", "numpy", "tokenizers"}


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    long = {
        f.name: f.end_lineno - f.lineno + 1
        for f in functions(ast.parse(text))
        if f.end_lineno and f.end_lineno - f.lineno + 1 > LONGEST_FUNCTION
    }
    assert not long


def test_tests_are_at_least_as_long_as_the_code() -> None:
    def lines(paths: list[Path]) -> int:
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)

    assert lines(sorted((REPOSITORY / "tests").rglob("*.py"))) >= lines(FILES)


def test_public_names() -> None:
    assert len(smollm2.__all__) <= MOST_PUBLIC_NAMES
    assert sorted(smollm2.__all__) == sorted(set(smollm2.__all__))
    for name in smollm2.__all__:
        assert getattr(smollm2, name) is not None
        assert name == "__version__" or getattr(smollm2, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = smollm2.nothing


def test_modules_that_the_docstring_names_need_no_import_of_their_own() -> None:
    code = (
        "import smollm2; print(smollm2.entries.decode.__name__, smollm2.errors.CacheError.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["decode", "CacheError"]


def test_import_loads_the_standard_library_only() -> None:
    """cases: P5; each framework and helper is loaded when it is first used."""
    code = "import sys, smollm2; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(run.stdout.split())


def test_generating_loads_no_framework(tmp_path: Path) -> None:
    from tests.tiny import random_weights, tiny_config, write_hf

    folder = write_hf(tmp_path / "tiny", tiny_config(), random_weights(tiny_config()))
    code = (
        "import sys, smollm2\n"
        f"smollm2.load({str(folder)!r}).generate([1, 5, 7], max_tokens=2)\n"
        "print(*sorted(m.partition('.')[0] for m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "numpy" in loaded
    assert loaded.isdisjoint(HEAVY - {"numpy", "tokenizers"})


def test_extras_hold_what_the_package_imports() -> None:
    """And nothing else: what tests alone use is of dev. The versions are those of docstrings."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    text = "\n".join(path.read_text() for path in FILES)
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    for name in ("torch", "jax", "export"):
        assert {re.match(r"\w+", needed)[0] for needed in extras[name]} <= imported, name
    assert "onnxruntime>=1.23" in extras["dev"]
    assert "onnxruntime from 1.23 on" in text


def test_the_native_module_names_instruction_sets() -> None:
    from smollm2 import _native

    features = _native.cpu_features()
    assert features == list(dict.fromkeys(features))
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("no /proc/cpuinfo to compare with")
    line = next(
        line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))
    )
    theirs = set(line.split(":")[1].split())
    spelled = {"neon": "asimd", "neon_dotprod": "asimddp", "neon_i8mm": "i8mm"}
    assert {spelled.get(name, name) for name in features} <= theirs
    assert ("avx2" in features) == ("avx2" in theirs)
    assert ("avx512_vnni" in features) == ("avx512_vnni" in theirs)
