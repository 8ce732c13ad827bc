"""What a wheel has to do where it was installed, with nothing but what it needs to run.

``python tests/installed.py`` fails where the extension is missing, or computes other than NumPy.
"""

from __future__ import annotations

import numpy as np

import smollm2
from smollm2 import _native
from smollm2.backends import get_backend
from smollm2.batch import Batch, Span
from smollm2.config import Config
from smollm2.weights import Weights

CONFIG = Config(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=2,
)


def main() -> None:
    """Both backends give the same logits, on every number of threads."""
    rng = np.random.default_rng(0)

    def make(name: str) -> np.ndarray:
        shape = CONFIG.shapes[name]
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(len(shape) ** 3)

    weights = Weights.build(make, num_layers=CONFIG.num_hidden_layers, tied=True)
    batch = Batch.build([Span(0, 0, list(range(90)), "all")])
    expected = get_backend("numpy").load(CONFIG, weights).forward(batch)
    for quant, off in {"f32": 1e-3, "q8": 0.1}.items():
        logits = [
            get_backend("native").load(CONFIG, weights, quant=quant, threads=threads).forward(batch)
            for threads in (1, 2)
        ]
        assert np.array_equal(*logits), quant
        size = np.sqrt((expected**2).mean())
        assert np.sqrt(((logits[0] - expected) ** 2).mean()) < off * size, quant
    assert _native.kernels.chosen() == _native.kernels.isa_names()[-1]
    assert smollm2.__version__


if __name__ == "__main__":
    main()
