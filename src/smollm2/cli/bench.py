"""``smollm2 bench``: how fast a model reads and writes."""

from __future__ import annotations

from typing import Annotated

import typer

from smollm2.cli import options
from smollm2.cli.loading import load_model
from smollm2.cli.terminal import Terminal


def bench(
    model: options.Model = options.DEFAULT_MODEL,
    backend: options.Backend = None,
    quant: options.Quant = None,
    threads: options.Threads = None,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", help="Tokens to read.")] = 512,
    decode: Annotated[int, typer.Option("--decode", metavar="N", help="Tokens to write.")] = 128,
    depth: Annotated[
        int, typer.Option("--depth", metavar="N", help="Tokens that each row holds before.")
    ] = 0,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Rows of decode.")] = 1,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", help="Runs, of which the best counts.")
    ] = 3,
    offline: options.Offline = False,
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Measure prefill and decode in tokens per second. Nothing is sampled.

    Example: smollm2 bench --depth 4096 --threads 2
    """
    from smollm2.backends import default_backend
    from smollm2.bench import Workload, measure

    terminal = Terminal(no_color=no_color)
    backend = backend or default_backend()
    work = Workload(prompt=prompt, decode=decode, depth=depth, batch=batch, repeats=repeats)
    loaded = load_model(
        model, terminal, offline=offline, backend=backend, quant=quant, threads=threads
    )
    speed = measure(loaded.lm, work)
    used = getattr(loaded.lm, "threads", threads)
    if json:
        name = loaded.path.name if loaded.path else model
        terminal.json(
            {
                "engine": f"smollm2 {backend}",
                "model": name,
                "threads": used,
                "batch": batch,
                "depth": depth,
                "prefill": round(speed.prefill, 3),
                "decode": round(speed.decode, 3),
            }
        )
    else:
        terminal.line(f"prefill  {speed.prefill:8.1f} tokens/s  ({prompt} tokens)")
        rows = f"batch {batch}, depth {depth}"
        terminal.line(f"decode   {speed.decode:8.1f} tokens/s  ({rows})")
