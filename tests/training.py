"""Packed sequences for tests of training, and what transformers makes of them one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.config import Config
from tests.tiny import Arrays

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Packed:
    """Sequences one after the other: arrays [P] each; padding is in segment -1."""

    tokens: Ints
    positions: Ints
    segments: Ints
    targets: Ints
    factors: Floats

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints, Ints, Floats]:
        return self.tokens, self.positions, self.segments, self.targets, self.factors

    def sequences(self) -> list[NDArray[np.intp]]:
        """Where the tokens of each sequence lie."""
        return [np.flatnonzero(self.segments == n) for n in range(self.segments.max() + 1)]


def packed(lengths: list[int], *, vocabulary: int, padding: int = 0, seed: int = 0) -> Packed:
    """Random sequences; of each, the first third and the last token are not learned."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, vocabulary, length) for length in lengths]
    factors = [rng.uniform(0.5, 1.5, length) for length in lengths]
    targets = [np.append(ids[1:], -100) for ids in tokens]
    for target, factor, length in zip(targets, factors, lengths, strict=True):
        target[: length // 3] = -100
        factor[target < 0] = 0
    pad = np.zeros(padding)
    segments = [np.full(length, n) for n, length in enumerate(lengths)]
    return Packed(
        *(
            np.concatenate([*parts, fill]).astype(np.int32)
            for parts, fill in (
                (tokens, pad),
                ([np.arange(length) for length in lengths], pad),
                (segments, pad - 1),
                (targets, pad - 100),
            )
        ),
        np.concatenate([*factors, pad]).astype(np.float32),
    )


def hf_model(config: Config, weights: Arrays, dtype: Any = None) -> Any:
    """``LlamaForCausalLM`` of transformers with these weights, in float64 or ``dtype``."""
    import torch
    import transformers

    values = {**config.to_dict(), "pad_token_id": None}  # of which it would learn no embedding
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    state = {name: torch.tensor(np.asarray(array)) for name, array in weights.items()}
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    assert set(report.missing_keys) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model.to(dtype or torch.float64).eval()


def hf_loss(model: Any, batch: Packed) -> Any:
    """The sum of factors · -log p(target), each sequence by itself."""
    import torch

    total = torch.zeros((), dtype=torch.float64)
    for places in batch.sequences():
        logits = model(torch.tensor(batch.tokens[places])[None].long()).logits[0]
        losses = torch.nn.functional.cross_entropy(
            logits, torch.tensor(batch.targets[places]).long(), reduction="none"
        )
        total = total + (losses * torch.tensor(batch.factors[places])).sum()
    return total


def hf_gradients(model: Any, batch: Packed) -> tuple[float, dict[str, NDArray[Any]]]:
    """The loss, and its gradient by each parameter."""
    model.zero_grad()
    loss = hf_loss(model, batch)
    loss.backward()
    return loss.item(), {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


def assert_same_gradients(
    got: Any, expected: dict[str, NDArray[Any]], tolerance: float = 1e-5
) -> None:
    """That each tensor's gradient is, relative to its size, as near as ``tolerance``."""
    pairs = dict(got.items())
    assert set(pairs) == set(expected)
    for name, array in pairs.items():
        want = np.asarray(expected[name], np.float64)
        difference = np.linalg.norm(np.asarray(array, np.float64) - want)
        assert difference <= tolerance * np.linalg.norm(want), name
