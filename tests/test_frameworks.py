"""The benchmark of frameworks: contenders agree on a tiny model, and the table says so."""

from __future__ import annotations

from pathlib import Path

import frameworks
import numpy as np
import pytest
from contenders import CONTENDERS, Setting, run

from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("frameworks")
    frameworks.write_checkpoint(folder, tiny_config(vocab_size=20_000))
    return Setting(
        folder=str(folder),
        device="cpu",
        dtype="float32",
        threads=1,
        iterations=1,
        prompt=16,
        decode=4,
    )


@pytest.mark.parametrize("name", ["numpy", "native f32", "torch", "jax"])
def test_contenders_write_what_transformers_writes(setting: Setting, name: str) -> None:
    """Every contender is measured on the same work: its logits are those of transformers."""
    ids = np.random.default_rng(0).integers(100, 20_000, setting.prompt).tolist()
    reference, model = CONTENDERS["transformers"].open(setting), CONTENDERS[name].open(setting)
    np.testing.assert_allclose(model.logits(ids), reference.logits(ids), rtol=1e-4, atol=1e-4)
    tokens = [reference.first(ids)], [model.first(ids)]
    for _ in range(3):
        for contender, written in zip((reference, model), tokens, strict=True):
            written.append(contender.next(written[-1]))
    assert tokens[0] == tokens[1]


def test_a_turn_measures_everything_and_leaves_its_logits(setting: Setting) -> None:
    found = run("numpy", setting)
    assert set(found) == {"prefill", "ttft_ms", "decode", "load_s", "peak_mib"}
    assert min(found.values()) > 0
    assert np.load(Path(setting.folder) / "numpy.npy").shape == (20_000,)


def test_the_table_has_medians_and_ratios_to_the_first() -> None:
    turn = {"prefill": 100.0, "ttft_ms": 5.0, "decode": 10.0, "load_s": 1.0, "peak_mib": 50.0}
    fast = [turn | {"decode": rate} for rate in (5.0, 20.0, 90.0)]
    lines = frameworks.table(
        {"transformers": [turn], "failed": [], "jax": fast}, {"transformers": 0.0, "jax": 0.125}
    ).splitlines()
    assert [line.split(" |")[0] for line in lines[2:]] == ["| transformers", "| jax"]
    assert lines[3].endswith("| 20.0 | 1.00 | 50 | 0.12 | 1.00 | 2.00 |")
