"""``smollm2 run``: continue a prompt."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smollm2.cli import options
from smollm2.cli.grouping import HIDDEN, grouped
from smollm2.cli.interrupts import on_interrupt
from smollm2.cli.loading import load_model
from smollm2.cli.stats import stats_parts
from smollm2.cli.terminal import CYAN, Terminal
from smollm2.cli.usage import UsageError

if TYPE_CHECKING:
    from smollm2.results import Generation
    from smollm2.streaming import Stream
    from smollm2.template import Message

INTERRUPTED = 130
_NOTHING = "nothing was generated, the model ended at once: to ask a question, add --chat"

Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="What to continue; - or a pipe reads stdin."),
]
PromptOption = Annotated[
    str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="PROMPT, as an option.")
]
Chat = Annotated[
    bool,
    typer.Option(
        "-c", "--chat", help="Ask as a chat message, under the template's own system prompt."
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="--chat under this system prompt.")
]
Echo = Annotated[
    bool | None,
    typer.Option("--echo/--no-echo", help="Show the prompt too.  [default: on a terminal]"),
]


@grouped
def run(
    *,
    prompt: Prompt = None,
    prompt_option: PromptOption = None,
    loading: options.Loading,
    computing: Annotated[options.Computing, HIDDEN],
    quant: options.HiddenQuant = None,
    sampling: options.Sampling,
    chat: Chat = False,
    system: System = None,
    echo: Echo = None,
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Continue a prompt. The text goes to stdout, all else to stderr.

    With --chat the prompt is a question, and the text is the answer.

    What computes is told as in bench: --backend, --quant, --threads, --kv; of torch and jax,
    --device, --dtype, --compile, --numerics.

    Example: smollm2 run "The capital of France is" -n 20
    """
    terminal = Terminal(no_color=no_color)
    params = sampling.params()
    if prompt is not None and prompt_option is not None:
        raise UsageError("the prompt is there twice: give PROMPT or -p, not both")
    text = options.read_text(prompt if prompt_option is None else prompt_option)
    asks = chat or system is not None
    if asks and echo:
        raise UsageError("--echo shows the prompt of a completion: leave it out of a --chat")
    loaded = load_model(loading, computing, terminal, quant=quant)
    if asks:
        stream = loaded.chat(system, params=params).stream(text)
    else:
        echoes = terminal.interactive and not json if echo is None else echo
        stream = loaded.stream(text, params, echo=echoes)
    with on_interrupt(stream.cancel) as interrupted:
        if not json:
            _show(stream, terminal)
        result = stream.finish()
    if json:
        asked = {"messages": _messages(system, text)} if asks else {"prompt": text}
        terminal.json({"model": loading.model, **asked, **_described(result)})
    else:
        terminal.note(*stats_parts(result, with_reason=True))
    if not asks and loaded.template is not None and result.token_ids == (result.stopped_by,):
        terminal.note(_NOTHING)
    if interrupted.is_set():
        raise typer.Exit(INTERRUPTED)


def _show(stream: Stream, terminal: Terminal) -> None:
    for piece in stream:
        terminal.text(piece.text, CYAN if piece.origin == "prompt" else None)
    terminal.end_line()


def _messages(system: str | None, text: str) -> list[Message]:
    question: Message = {"role": "user", "content": text}
    return [question] if system is None else [{"role": "system", "content": system}, question]


def _described(result: Generation) -> dict[str, Any]:
    """Describe a result for ``--json``."""
    stats = result.stats
    rates = {
        "total_seconds": stats.total_seconds,
        "prefill_tokens_per_second": stats.prefill_tokens_per_second,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
    }
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stopped_by": result.stopped_by,
        "seed": stats.seed,
        "stats": {**asdict(stats), **rates},
    }
