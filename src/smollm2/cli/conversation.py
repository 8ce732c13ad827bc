"""Conversation: the loop of a chat, its prompt, and the commands that start with a slash."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from smollm2.cli.interrupts import on_interrupt
from smollm2.cli.keyboard import no_echo, typed_lines
from smollm2.cli.stats import stats_parts
from smollm2.cli.terminal import CYAN, DIM, GREEN, Terminal, cut_in_front, oserror_text
from smollm2.errors import InputError, SmolLM2Error

if TYPE_CHECKING:
    from smollm2.chat import ChatSession
    from smollm2.results import Generation, Stats

_YOU, _AI = ("You › ", CYAN), (" AI › ", GREEN)
_LABELS = {"user": _YOU, "assistant": _AI}


class Conversation:
    """A chat over stdin and stdout: with a person, or line by line through a pipe."""

    def __init__(self, session: ChatSession, terminal: Terminal) -> None:
        self._session = session
        self._terminal = terminal
        self._with_person = sys.stdin is not None and sys.stdin.isatty()
        self._is_on_screen = self._with_person and terminal.interactive
        self._answered: Generation | None = None
        self._shows_stats = False
        self._over = False

    def run(self, name: str) -> None:
        """Take turns until ``/exit``, the end of the input, or Ctrl-C at an empty prompt.

        What goes wrong in a turn is shown to a person, who can go on, and raised in a pipe.
        """
        if self._with_person:
            context = self._session.model.config.max_position_embeddings
            facts = f" · {context} tokens of context · /help, Ctrl-D to leave"
            self._terminal.note(cut_in_front(name, facts) + facts)
        try:
            for line in self._lines():
                self._turn(line.strip())
                if self._over:
                    return
        except KeyboardInterrupt:
            if not self._with_person:
                raise
            self._terminal.end_line()

    def _lines(self) -> Iterator[str]:
        if sys.stdin is None:
            return
        try:
            yield from typed_lines(self._terminal, *_YOU) if self._with_person else sys.stdin
        except UnicodeDecodeError:
            raise InputError("stdin is not UTF-8 text") from None

    def _turn(self, said: str) -> None:
        try:
            if said.startswith("/") or said.lower() in _ALIASES:
                self._obey(said)
            elif said:
                self._answer(said)
        except BrokenPipeError:
            raise
        except (SmolLM2Error, OSError) as error:
            if not self._with_person:
                raise
            self._terminal.end_line()
            self._terminal.error(oserror_text(error) if isinstance(error, OSError) else str(error))

    def _answer(self, said: str) -> None:
        stream = self._session.stream(said)
        if self._is_on_screen:
            self._terminal.text(*_AI)
        with no_echo(), on_interrupt(stream.cancel) as interrupted:
            for piece in stream:
                self._terminal.text(piece.text)
        self._answered = stream.result
        if self._is_on_screen and stream.result.finish_reason == "cancelled":
            self._terminal.text(" (stopped)", DIM)
        self._terminal.end_line()
        if self._with_person and stream.result.finish_reason == "length":
            self._terminal.note(self._why_no_longer(stream.result.stats))
        if self._shows_stats:
            self._terminal.note(*stats_parts(stream.result))
        if interrupted.is_set() and not self._with_person:
            raise KeyboardInterrupt

    def _why_no_longer(self, stats: Stats) -> str:
        if stats.total_tokens >= self._session.model.config.max_position_embeddings:
            return "… stopped, the context is full: /reset starts anew"
        return f"… stopped at {stats.generated_tokens} tokens: -n sets more"

    def _obey(self, said: str) -> None:
        name, _, argument = said.partition(" ")
        command = _COMMANDS.get(_ALIASES.get(name.lower(), name))
        if command is None:
            near = difflib.get_close_matches(name, _COMMANDS, n=1)
            raise InputError(f"there is no command {name}: try {near[0] if near else '/help'}")
        command.act(self, argument.strip())

    def _help(self, _: str) -> None:
        for name, command in _COMMANDS.items():
            self._terminal.note(f"{f'{name} {command.argument}':16}{command.what}")

    def _reset(self, _: str) -> None:
        self._session.reset()
        self._terminal.note("the conversation starts anew")

    def _system(self, text: str) -> None:
        if text:
            self._session.system = "" if text in ('""', "''") else text
            self._terminal.note("the system prompt is set, also for what was said before")
        else:
            self._terminal.note(f"the system prompt is {_system_text(self._session)}")

    def _prompt(self, _: str) -> None:
        session = self._session
        is_asked = bool(session.messages) and session.messages[-1]["role"] == "user"
        self._terminal.text(
            session.template.render(
                session.messages, system=session.system, add_generation_prompt=is_asked
            )
        )
        self._terminal.end_line()

    def _save(self, path: str) -> None:
        self._session.save(_file_name(path, "/save"))
        self._terminal.note(f"saved {len(self._session)} messages in {path}")

    def _load(self, path: str) -> None:
        old = self._session
        self._session = type(old).load(
            old.model,
            _file_name(path, "/load"),
            params=old.params,
            template=old.template,
            drop_oldest=old.drop_oldest,
        )
        self._terminal.note(f"loaded {len(self._session)} messages from {path}")
        if self._is_on_screen:
            self._show_last_exchange()

    def _show_last_exchange(self) -> None:
        for message in self._session.messages[-2:]:
            label, content = _LABELS.get(message["role"]), message.get("content")
            if label is not None and isinstance(content, str):
                self._terminal.text(*label)
                self._terminal.line(content)

    def _show_stats(self, choice: str) -> None:
        if choice not in ("", "on", "off"):
            raise InputError(f"/stats {choice} is not possible: it is /stats, /stats on or off")
        if choice:
            self._shows_stats = choice == "on"
            self._terminal.note(
                "numbers follow each answer" if self._shows_stats else "no numbers any more"
            )
        elif self._answered is None:
            self._terminal.note("nothing was said yet")
        else:
            self._terminal.note(*stats_parts(self._answered))

    def _leave(self, _: str) -> None:
        self._over = True


class _Command(NamedTuple):
    act: Callable[[Conversation, str], None]
    argument: str
    what: str


_COMMANDS: Mapping[str, _Command] = {
    "/reset": _Command(Conversation._reset, "", "forget what was said"),
    "/system": _Command(
        Conversation._system, "TEXT", 'set the system prompt ("" for an empty one), or show it'
    ),
    "/prompt": _Command(Conversation._prompt, "", "show the text that the model sees"),
    "/stats": _Command(Conversation._show_stats, "on|off", "numbers of each answer, or the last"),
    "/save": _Command(Conversation._save, "FILE", "write the conversation to a file"),
    "/load": _Command(Conversation._load, "FILE", "go on with a saved conversation"),
    "/help": _Command(Conversation._help, "", "show this"),
    "/exit": _Command(
        Conversation._leave, "", "leave; so do exit, quit, Ctrl-D, Ctrl-C at the prompt"
    ),
}

_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("exit", "quit", "/quit", "/bye", "/q"), "/exit"),
    "/clear": "/reset",
}


def _system_text(session: ChatSession) -> str:
    if session.system is None:
        return "the model's own"
    return repr(session.system) if session.system is not False else "left out"


def _file_name(path: str, command: str) -> str:
    if not path:
        raise InputError(f"{command} needs the name of a file")
    return path
