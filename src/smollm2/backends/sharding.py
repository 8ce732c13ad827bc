"""Sharding: into how many parts the weights of a model split, whichever framework places them."""

from __future__ import annotations

from math import gcd

from smollm2.config import Config
from smollm2.errors import InputError


def shard_counts(config: Config) -> tuple[int, ...]:
    """Numbers of shards that a model splits into, in rising order.

    Heads, kv heads, the width of the mlp and the vocabulary are split, so these divide all four.
    """
    common = gcd(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
    )
    return tuple(n for n in range(1, common + 1) if common % n == 0)


def check_shards(config: Config, shards: int) -> None:
    """Raise ``InputError`` for a number of shards that the model does not split into."""
    counts = shard_counts(config)
    if shards not in counts:
        raise InputError(
            f"tensor_parallel={shards} does not divide {config.num_attention_heads} heads, "
            f"{config.num_key_value_heads} kv heads, an mlp of {config.intermediate_size} and a "
            f"vocabulary of {config.vocab_size}: choose from {', '.join(map(str, counts))}"
        )
