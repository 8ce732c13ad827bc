"""Into how many shards a model splits."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from random_model import SIZES

from smollm2.backends.sharding import check_shards, shard_counts
from smollm2.errors import InputError
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("size", "counts"), [("135M", (1, 3)), ("360M", (1,)), ("1.7B", (1, 2, 4, 8, 16, 32))]
)
def test_the_sizes_of_smollm2(size: str, counts: tuple[int, ...]) -> None:
    """Feature row 114. Of 360M, 5 kv heads have no divisor in common with the vocabulary."""
    assert shard_counts(SIZES[size]) == counts


@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 4),
    mlp=st.integers(1, 96),
    vocabulary=st.integers(3, 120),
    shards=st.integers(-1, 14),
)
def test_a_number_is_taken_where_it_divides_all(
    kv_heads: int, group: int, mlp: int, vocabulary: int, shards: int
) -> None:
    config = tiny_config(
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        vocab_size=vocabulary,
    )
    divides = shards > 0 and not any(
        count % shards for count in (kv_heads * group, kv_heads, mlp, vocabulary)
    )
    if divides:
        check_shards(config, shards)
    else:
        with pytest.raises(InputError):
            check_shards(config, shards)


def test_the_error_lists_what_divides() -> None:
    message = (
        r"tensor_parallel=2 does not divide 9 heads, 3 kv heads, an mlp of 1536 and a vocabulary "
        r"of 49152: choose from 1, 3$"
    )
    with pytest.raises(InputError, match=message):
        check_shards(SIZES["135M"], 2)
    with pytest.raises(InputError, match=r"tensor_parallel=0 .*: choose from 1, 3"):
        check_shards(SIZES["135M"], 0)
