"""``smollm2 eval``: perplexity, KL divergence and top-1 agreement of a format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from smollm2.cli import options
from smollm2.cli.loading import load_model
from smollm2.cli.terminal import Terminal


def eval_(
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Text to read, in UTF-8.")],
    model: options.Model = options.DEFAULT_MODEL,
    backend: options.Backend = None,
    quant: Annotated[
        list[str] | None,
        typer.Option("--quant", metavar="KIND", help="Kind of weights; repeatable."),
    ] = None,
    threads: options.Threads = None,
    windows: Annotated[
        int, typer.Option("--windows", metavar="N", help="Windows of 1,024 tokens, from the start.")
    ] = 4,
    offline: options.Offline = False,
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Measure what a format costs beside float32.

    Perplexity, mean KL divergence in nats, and how often both find the same token likeliest.

    Example: smollm2 eval --text book.txt --quant q8 --quant q4
    """
    from smollm2 import evaluate as evaluation

    terminal = Terminal(no_color=no_color)
    content = options.read_file(text)
    reference = load_model(model, terminal, offline=offline, backend="numpy")
    ids = reference.tokenizer.encode(content)
    size = min(evaluation.WINDOW, reference.config.max_position_embeddings)
    parts = evaluation.windows(ids, size=size)[:windows]
    kinds: list[str | None] = [*quant] if quant else [None]
    for kind in kinds:
        loaded = load_model(
            model, terminal, offline=offline, backend=backend, quant=kind, threads=threads
        )
        quality = evaluation.evaluate(loaded.lm, parts, reference.lm)
        _show(terminal, kind or "as the file is", quality, json=json)
        loaded.close()


def _show(terminal: Terminal, kind: str, quality: Any, *, json: bool) -> None:
    if json:
        terminal.json(
            {
                "kind": kind,
                "tokens": quality.tokens,
                "perplexity": quality.perplexity,
                "reference_perplexity": quality.reference_perplexity,
                "mean_kl": quality.mean_kl,
                "top1": quality.top1,
            }
        )
        return
    terminal.line(
        f"{kind:<15} perplexity {quality.perplexity:.4f} ({quality.change:+.3%})  "
        f"KL {quality.mean_kl:.6f}  top-1 {quality.top1:.2%}"
    )
