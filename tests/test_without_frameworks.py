"""Without PyTorch, JAX or what exports need: one line says so, and all else works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.fakes import write_byte_tokenizer
from tests.tiny import random_weights, tiny_config, write_hf

FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "optax", "transformers", "onnx", "onnxscript")

HIDE = f"""
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FRAMEWORKS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in {FRAMEWORKS} else real(name, package)
)
sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer."""
    config = tiny_config(vocab_size=260)
    path = write_hf(tmp_path_factory.mktemp("model") / "hf", config, random_weights(config))
    write_byte_tokenizer(path)
    return path


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has no frameworks."""
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def smollm2(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("from smollm2.__main__ import main\nsys.exit(main())", *arguments)


@pytest.mark.parametrize(("backend", "needs"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_a_backend_says_what_to_install(folder: Path, backend: str, needs: str) -> None:
    done = smollm2("run", "hi", "-n", "1", "-m", str(folder), "--backend", backend)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: backend={backend!r} needs {needs}, which is not installed: "
        f"pip install 'smollm2[{backend}]'\n"
    )


@pytest.mark.parametrize("target", ["onnx", "stablehlo"])
def test_an_export_says_what_to_install(folder: Path, tmp_path: Path, target: str) -> None:
    out = tmp_path / "graph"
    bind = ["--bind", "B=1", "--bind", "S=8"]
    done = smollm2(
        "export", str(folder), "--to", target, "--entry", "prefill", *bind, "-o", str(out)
    )
    assert done.returncode == 1
    assert not out.exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("pip install 'smollm2[export]'")


def test_all_else_works(folder: Path, tmp_path: Path) -> None:
    """Both backends of the core, entries, other exports, the list of entries."""
    code = """
import numpy as np
import smollm2
from smollm2 import entries
from smollm2.export import export_gguf, export_smol

logits = []
for backend, options in (("numpy", {}), ("native", {"quant": "f32"})):
    model = smollm2.load(sys.argv[1], backend=backend, **options)
    assert model.generate("ab", max_tokens=2).text is not None
    logits.append(entries.forward(model.lm, [[5, 6, 7]]))
    cache = model.lm.new_cache(1, 8)
    entries.prefill(model.lm, cache, [[5, 6]])
    entries.generate(model.lm, cache, [[7]], 2, 3)
assert np.allclose(*logits, atol=1e-4)
checkpoint = smollm2.load_checkpoint(sys.argv[1])
export_smol(checkpoint, sys.argv[2] + "/m.smol", quant="q8")
export_gguf(checkpoint, sys.argv[2] + "/m.gguf")
smollm2.save_checkpoint(checkpoint, sys.argv[2] + "/hf")
"""
    done = python(code, str(folder), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"m.smol", "m.gguf", "hf"}
    listed = smollm2("export", "--entries")
    assert listed.returncode == 0
    assert listed.stdout.startswith("forward(tokens [B, S])")
