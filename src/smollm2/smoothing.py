"""Smoothing: what is hard to round moves from activations into weights, before 8 or 4 bit are made.

An input channel of a product is divided by s, and its column of the weights multiplied by s:

    s = sqrt(rms of the channel / rms of its column)

so that both have about the same range. The division is folded into what writes the channel (the
norm's gain, the rows of up, the rows of the values), so that the model computes the same and costs
the same. Source: Xiao et al. 2023 (SmoothQuant), with root mean squares for maximums. What the mean
square of a channel is then says how much an error in its column counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.backends.numpy import NumpyOps, Plan
from smollm2.batch import Batch, Span
from smollm2.checkpoint import Checkpoint
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.kinds import rounded_to
from smollm2.model import hidden
from smollm2.quantize import Quantized, Scaled, Weight, as_float32
from smollm2.weights import Attention, Block, Mlp, Weights

Floats = NDArray[np.float32]

TOKENS = 2048
"""Tokens of a calibration text that are read, in segments from all over it."""

_SEGMENT = 64
_SOON = 10_000_000  # parameters that take no time to speak of
_LEAST = 1e-6  # of the greatest channel, so that a silent one asks for no endless factor
_LEAST_COUNT = 1e-3  # of the mean, so that errors in a channel that was silent count too


def calibration_text() -> str:
    """The text that comes with the package: prose, chat, code, tables, several languages."""
    return files("smollm2").joinpath("calibration.txt").read_text(encoding="utf-8")


def easier_to_round(
    checkpoint: Checkpoint,
    quant: str | None,
    text: str | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Weights[Weight]:
    """Smooth a checkpoint's weights where they are to be rounded to 8 or 4 bit.

    ``text`` is what to calibrate with, by default ``calibration_text()`` or, without a tokenizer,
    ids from all over the vocabulary. Weights come back as they are where ``kinds.rounded_to`` says
    that they are not rounded. ``say`` is told before a model that takes seconds.

    Raises ``InputError`` for a text that is empty, or that there is no tokenizer for.
    """
    weights, tokenizer = checkpoint.weights, checkpoint.tokenizer
    kind = rounded_to(dict(weights.items()), quant)
    if kind is None:
        return weights
    if checkpoint.config.parameter_count > _SOON:
        say(f"fitting the weights to {kind}, which an exported file has behind it")
    if tokenizer is not None:
        ids = tokenizer.encode(calibration_text() if text is None else text, allow_special=True)
    elif text is None:
        ids = _ids_without_text(checkpoint.config.vocab_size)
    else:
        raise InputError(f"{checkpoint.path} has no tokenizer to read a calibration text with")
    return smoothed(checkpoint.config, weights, ids)


def _ids_without_text(vocab_size: int) -> list[int]:
    """Ids that are spread over a vocabulary, in an order without a pattern that shows."""
    golden_ratio = (np.sqrt(5) - 1) / 2
    return [int(part * vocab_size) for part in np.arange(TOKENS) * golden_ratio % 1]


def smoothed(config: Config, weights: Weights[Weight], ids: Sequence[int]) -> Weights[Weight]:
    """The same model with weights that round better; ``ids`` is a text like those it will read.

    Nothing dense is held: factors are applied when a weight is read. Where activations are not
    finite, or all zero, weights stay as they are. Raises ``InputError`` where there are no ids.
    """
    if not ids:
        raise InputError("a calibration text needs at least one token")
    squares = _squares(config, weights, _segments(ids, config.max_position_embeddings))
    blocks = tuple(_smoothed(config, block, squares) for block in weights.blocks)
    return Weights(weights.token_embedding, blocks, weights.final_norm, weights.head)


class _Recorder(NumpyOps):
    """Runs weights of any kind, one matrix in memory at a time, and looks at their inputs."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.squares: dict[int, NDArray[np.float64]] = {}

    def embed(self, table: Any, plan: Plan) -> Floats:
        ids = plan.batch.ids
        return as_float32(table.take_rows(ids) if isinstance(table, Quantized) else table[ids])

    def rms_norm(self, x: Floats, weight: Any) -> Floats:
        return super().rms_norm(x, as_float32(weight))

    def linear(self, x: Floats, weight: Any) -> Floats:
        # The first token is not left out: all others attend to it, and some of its channels are a
        # thousand times as great as theirs.
        self.squares[id(weight)] = np.einsum("tc,tc->c", x, x, dtype=np.float64)
        return super().linear(x, as_float32(weight))


def _segments(ids: Sequence[int], context: int) -> list[Sequence[int]]:
    """``TOKENS`` ids, or fewer of a shorter text, in segments at even distances."""
    size = min(_SEGMENT, context, len(ids))
    count = min(TOKENS // size, -(-len(ids) // size))
    starts = np.linspace(0, len(ids) - size, count).astype(int)
    return [ids[start : start + size] for start in starts.tolist()]


def _squares(
    config: Config, weights: Weights[Weight], segments: Sequence[Sequence[int]]
) -> dict[int, NDArray[np.float64]]:
    """Sums of squares of each matrix's input channels, by the identity of the matrix."""
    ops = _Recorder(config)
    spans = [Span(0, 0, segment, "none") for segment in segments]
    with np.errstate(all="ignore"):
        hidden(weights, ops, ops.plan(Batch.build(spans), None))
    return ops.squares


def _smoothed(
    config: Config, block: Block[Weight], squares: dict[int, NDArray[np.float64]]
) -> Block[Weight]:
    attention, mlp = block.attention, block.mlp
    into_qkv = _factors(squares, attention.query, (attention.query, attention.key, attention.value))
    into_mlp = _factors(squares, mlp.gate, (mlp.gate, mlp.up))
    into_down = _factors(squares, mlp.down, (mlp.down,))
    # Query heads that share a kv head read the same values.
    into_output = _factors(squares, attention.output, (attention.output,))
    shape = (config.num_key_value_heads, -1, config.head_dim)
    of_values: Floats = np.exp(np.log(into_output).reshape(shape).mean(axis=1))
    group = config.num_attention_heads // config.num_key_value_heads
    into_output = np.repeat(of_values[:, None], group, axis=1).reshape(-1)
    qkv_counts = _importance(squares, attention.query, into_qkv)
    mlp_counts = _importance(squares, mlp.gate, into_mlp)
    return Block(
        input_norm=as_float32(block.input_norm) / into_qkv,
        attention=Attention(
            query=Scaled(attention.query, columns=into_qkv, importance=qkv_counts),
            key=Scaled(attention.key, columns=into_qkv, importance=qkv_counts),
            value=Scaled(
                attention.value,
                rows=np.reciprocal(of_values.reshape(-1)),
                columns=into_qkv,
                importance=qkv_counts,
            ),
            output=Scaled(
                attention.output,
                columns=into_output,
                importance=_importance(squares, attention.output, into_output),
            ),
        ),
        post_attention_norm=as_float32(block.post_attention_norm) / into_mlp,
        mlp=Mlp(
            gate=Scaled(mlp.gate, columns=into_mlp, importance=mlp_counts),
            up=Scaled(
                mlp.up, rows=np.reciprocal(into_down), columns=into_mlp, importance=mlp_counts
            ),
            down=Scaled(
                mlp.down,
                columns=into_down,
                importance=_importance(squares, mlp.down, into_down),
            ),
        ),
    )


def _importance(
    squares: dict[int, NDArray[np.float64]], read: Weight, factors: Floats
) -> Floats | None:
    """How much an error in each column counts; None, all the same, where inputs are no numbers."""
    counts = squares.get(id(read), np.zeros(read.shape[1])) / np.square(factors, dtype=np.float64)
    mean = counts.mean()
    if not (np.isfinite(mean) and mean > 0):
        return None
    importance: Floats = np.maximum(counts / mean, _LEAST_COUNT).astype(np.float32)
    return importance


def _factors(
    squares: dict[int, NDArray[np.float64]], read: Weight, weights: Iterable[Weight]
) -> Floats:
    """What to multiply each column of ``weights`` with, whose input is that of ``read``."""
    channel = np.sqrt(squares.get(id(read), np.zeros(read.shape[1])))
    column = np.zeros(read.shape[1])
    for weight in map(as_float32, weights):
        column += np.einsum("rc,rc->c", weight, weight, dtype=np.float64)
    np.sqrt(column, out=column)
    for part in (channel, column):
        if not (np.isfinite(part).all() and part.any()):
            return np.ones(len(part), dtype=np.float32)
        np.maximum(part, _LEAST * part.max(), out=part)
    factors = np.sqrt(channel / column)
    factors /= np.exp(np.log(factors).mean())
    return factors.astype(np.float32)
