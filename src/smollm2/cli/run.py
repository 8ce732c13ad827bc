"""``smollm2 run``: continue a prompt."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smollm2.cli import options
from smollm2.cli.interrupts import on_interrupt
from smollm2.cli.loading import load_model
from smollm2.cli.terminal import CYAN, Terminal

if TYPE_CHECKING:
    from smollm2.results import Generation
    from smollm2.streaming import Stream

INTERRUPTED = 130

Prompt = Annotated[
    str | None,
    typer.Option(
        "-p", "--prompt", metavar="TEXT", help="What to continue; - or a pipe reads stdin."
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system", metavar="TEXT", help="Ask as a chat message under this system prompt."
    ),
]
Echo = Annotated[
    bool | None,
    typer.Option("--echo/--no-echo", help="Show the prompt too.  [default: on a terminal]"),
]


def run(
    prompt: Prompt = None,
    model: options.Model = options.DEFAULT_MODEL,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    stop: options.Stop = None,
    system: System = None,
    echo: Echo = None,
    offline: options.Offline = False,
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Continue a prompt. The text goes to stdout, all else to stderr.

    With --system the prompt is a question, and the text is the answer.

    Example: smollm2 run -p "The capital of France is" -n 20
    """
    terminal = Terminal(no_color=no_color)
    params = options.sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        repetition_penalty=repetition_penalty,
        seed=seed,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=[options.unescape(text) for text in stop or ()],
    )
    text = options.read_text(prompt, "-p")
    loaded = load_model(model, terminal, offline=offline)
    echoes = terminal.interactive and not json if echo is None else echo
    if system is None:
        stream = loaded.stream(text, params, echo=echoes)
    else:
        stream = loaded.chat(system, params=params).stream(text)
    with on_interrupt(stream.cancel) as interrupted:
        if not json:
            _show(stream, terminal)
        result = stream.finish()
    if json:
        terminal.json(_described(model, result))
    else:
        terminal.note(f"{result.stats.summary()} · {result.finish_reason}")
    if interrupted.is_set():
        raise typer.Exit(INTERRUPTED)


def _show(stream: Stream, terminal: Terminal) -> None:
    for piece in stream:
        terminal.text(piece.text, CYAN if piece.origin == "prompt" else None)
    terminal.end_line()


def _described(model: str, result: Generation) -> dict[str, Any]:
    """Describe a result for ``--json``."""
    stats = result.stats
    rates = {
        "total_seconds": stats.total_seconds,
        "prefill_tokens_per_second": stats.prefill_tokens_per_second,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
    }
    return {
        "model": model,
        "prompt": result.prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stopped_by": result.stopped_by,
        "seed": stats.seed,
        "stats": {**asdict(stats), **rates},
    }
