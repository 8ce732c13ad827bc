"""``smollm2 eval``: perplexity, KL divergence and top-1 agreement of a format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smollm2.cli import options
from smollm2.cli.grouping import grouped
from smollm2.cli.loading import load_model
from smollm2.cli.terminal import Terminal
from smollm2.cli.usage import UsageError

if TYPE_CHECKING:
    from smollm2.causal_lm import CausalLM
    from smollm2.evaluate import Quality, Recording, Windows
    from smollm2.generate import SmolLM2

ALL = (None, "f32", "q16", "bf16", "q8", "q4", "q4m")
"""What ``--quant all`` goes through; None is the file as it is."""

_HEADER = ("KIND", "PERPLEXITY", "CHANGE", "KL", "TOP-1")


@grouped
def eval_(
    *,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Text to read, in UTF-8.")],
    loading: options.Loading,
    computing: options.Computing,
    quant: Annotated[
        list[str] | None,
        typer.Option(
            "--quant", metavar="KIND", help="Kind of weights, repeatable, or `all` of them."
        ),
    ] = None,
    windows: Annotated[
        str,
        typer.Option(
            "--windows",
            metavar="N|N,N…",
            help="How many windows of 1,024 tokens, or which: numbers from 0 with commas.",
        ),
    ] = "4",
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Measure what a format costs beside float32.

    Perplexity, mean KL divergence in nats, and how often both find the same token likeliest. A
    kind that changes perplexity by more than 5 % is warned of. Several kinds take 0.2 GB of
    temporary space a window, for what float32 says of it. What computes is told as in bench, with
    --device, --dtype, --compile and --numerics of torch and jax.

    Example: smollm2 eval --text book.txt --quant q8 --quant q4
    """
    from smollm2 import evaluate as evaluation

    terminal = Terminal(no_color=no_color)
    chosen, kinds = _numbers(windows), _kinds(quant)
    content = options.read_file(text)
    reference = load_model(loading, options.Computing(backend="numpy"), terminal)
    ids = reference.tokenizer.encode(content)
    size = min(evaluation.WINDOW, reference.config.max_position_embeddings)
    if "," in windows:
        parts = evaluation.windows(ids, size=size, choose=chosen)
    else:
        parts = evaluation.windows(ids, size=size)[: chosen[0]]
    load = partial(load_model, loading, computing, terminal)
    rows: list[tuple[str, Quality]] = []
    try:
        with terminal.status() as say:
            rows.extend(_compared(reference, parts, kinds, load, say))
    finally:  # an interrupt takes only the kind that is being read
        _show(terminal, rows, json=json)
    for name, quality in rows:
        if not quality.tolerable:
            terminal.note(
                f"{name} changes perplexity by {quality.change:+.1%}, more than "
                f"{evaluation.TOLERATED:.0%}: take another kind for everyday use"
            )


def _compared(
    reference: SmolLM2,
    parts: Windows,
    kinds: Sequence[str | None],
    load: Callable[..., SmolLM2],
    say: Callable[[str], None],
) -> Iterator[tuple[str, Quality]]:
    """Kinds by name, and the quality of each; the reference reads once, and not beside several."""
    from smollm2.evaluate import evaluate, recorded

    count = "1 window" if len(parts) == 1 else f"{len(parts)} windows"
    reading = f"reading {count} of {len(parts[0])} tokens"
    with ExitStack() as stack:
        exact: CausalLM | Recording = reference.lm
        if len(kinds) > 1:
            say(f"{reading}: the reference")
            exact = stack.enter_context(recorded(reference.lm, parts))
            reference.close()
        for kind in kinds:
            name = kind or "as it is"
            say(f"{reading}: {name}")
            with load(quant=kind) as loaded:
                yield name, evaluate(loaded.lm, parts, exact)


def _numbers(text: str) -> list[int]:
    """A count, at least 1, or numbers of windows."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    least = 0 if len(numbers) > 1 else 1
    if min(numbers) < least:
        raise UsageError(f"--windows takes a count, or numbers with commas between: not {text!r}")
    return numbers


def _kinds(quant: list[str] | None) -> list[str | None]:
    """The kinds that were asked for; ``all`` stands for ``ALL``."""
    from smollm2.kinds import QUANTS

    kinds: list[str | None] = []
    for name in quant or []:
        if name not in (*QUANTS, "all"):
            raise UsageError(f"--quant takes {', '.join(QUANTS)} or all: not {name!r}")
        kinds.extend(ALL if name == "all" else [name])
    return list(dict.fromkeys(kinds)) or [None]


def _show(terminal: Terminal, rows: Sequence[tuple[str, Quality]], *, json: bool) -> None:
    if not rows:
        return
    if not json:
        cells = [
            (
                name,
                f"{quality.perplexity:.4f}",
                f"{quality.change:+.3%}",
                f"{quality.mean_kl:.7f}",
                f"{quality.top1:.2%}",
            )
            for name, quality in rows
        ]
        terminal.table(_HEADER, cells, numbers=len(_HEADER) - 1)
        return
    for name, quality in rows:
        terminal.json(
            {
                "kind": name,
                "tokens": quality.tokens,
                "perplexity": quality.perplexity,
                "reference_perplexity": quality.reference_perplexity,
                "mean_kl": quality.mean_kl,
                "top1": quality.top1,
                "tolerable": quality.tolerable,
            }
        )
