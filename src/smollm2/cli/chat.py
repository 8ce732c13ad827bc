"""``smollm2 chat``: talk with a model."""

from __future__ import annotations

from typing import Annotated

import typer

from smollm2.cli import options
from smollm2.cli.conversation import Conversation
from smollm2.cli.loading import load_model
from smollm2.cli.terminal import Terminal
from smollm2.cli.usage import UsageError


def chat(
    model: options.Model = options.DEFAULT_MODEL,
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            metavar="TEXT",
            help="System prompt; '' for an empty one.",
        ),
    ] = None,
    no_system: Annotated[
        bool, typer.Option("--no-system", help="No system prompt at all.")
    ] = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    stop: options.Stop = None,
    drop_oldest: Annotated[
        bool,
        typer.Option("--drop-oldest", help="Forget old turns when the context is full."),
    ] = False,
    offline: options.Offline = False,
    no_color: options.NoColor = False,
) -> None:
    """Talk with a model. Each line of a pipe is a turn.

    Example: smollm2 chat --system "You answer in one sentence."
    """
    terminal = Terminal(no_color=no_color)
    if no_system and system is not None:
        raise UsageError("--system and --no-system exclude each other: give one of them")
    params = options.sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        repetition_penalty=repetition_penalty,
        seed=seed,
        top_p=top_p,
        top_k=top_k,
        stop=[options.unescape(text) for text in stop or ()],
    )
    loaded = load_model(model, terminal, offline=offline)
    session = loaded.chat(False if no_system else system, params=params, drop_oldest=drop_oldest)
    Conversation(session, terminal).run(model)
