"""ChatTemplate: messages → the text or the token ids that a model was trained on.

Only the template's own markup makes control tokens. What a message says is text, whatever it
looks like, unless ``allow_special`` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from smollm2.errors import FormatError, InputError, TemplateError
from smollm2.template.messages import Message, map_strings, normalise, tool_call_text
from smollm2.template.shadow import Shadow
from smollm2.tokenizer import Tokenizer, check_text

System = str | Literal[False] | None
"""``None``: as the template does by itself; a text, also ``""``: that block; ``False``: none."""

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system prompt that SmolLM2's template puts where a conversation has none."""

_START, _END = "<|im_start|>", "<|im_end|>"

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    f"{{{{ '{_START}system\n{DEFAULT_SYSTEM}{_END}\n' }}}}"
    "{% endif %}"
    f"{{{{'{_START}' + message['role'] + '\n' + message['content'] + '{_END}' + '\n'}}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{_START}assistant\n' }}}}{{% endif %}}"
)
"""The chat template of SmolLM2-Instruct, all sizes, as their tokenizer_config.json has it."""

_CONTINUED = "\udfff"  # marks the end of a message that is continued; no text can hold it
_PROBE_SHARE = 20  # of what a template may use up, for the conversation that is no one's
_CHANGED = (
    "with these messages the chat template writes other control tokens than with plain words: it "
    "would make some of what the messages say. Take what looks like one out of the messages, or "
    "set allow_special where they can be trusted"
)


class ChatTemplate:
    """The chat template ``source``, a Jinja text.

    SmolLM2's own is recognised and rendered by code of this package. It renders tool calls,
    which its source leaves out. Any other runs in a sandbox; it is compiled when it is first
    used, so a broken one raises ``TemplateError`` then.
    """

    def __init__(self, source: str) -> None:
        if not isinstance(source, str):
            raise TemplateError(f"a chat template is a text, not {type(source).__name__}")
        self.source = source
        # The same template where line feeds are written as escapes, or the file ends in one.
        same = source.removesuffix("\n").replace("\\n", "\n")
        self._is_smollm2 = same == SMOLLM2_TEMPLATE

    @classmethod
    def from_file(cls, path: Path | str) -> ChatTemplate:
        """Read a template, as in chat_template.jinja. Raises ``FormatError``."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not UTF-8 at byte {error.start}") from None
        except OSError as error:
            raise FormatError(f"{path}: {error.strerror or error}") from None

    def __repr__(self) -> str:
        name = "SmolLM2" if self._is_smollm2 else f"{self.source[:40]!r}…"
        return f"ChatTemplate({name})"

    def render(
        self,
        messages: Sequence[Message],
        *,
        system: System = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> str:
        """Return the text of a conversation, for people: encoding it would trust its messages.

        Arguments as in ``encode``. A template that writes ``bos_token`` or ``eos_token`` takes
        them from ``tokenizer``.
        """
        conversation = _conversation(messages, system, continue_final)
        return self._text(conversation, system, add_generation_prompt, continue_final, tokenizer)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        system: System = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        allow_special: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation.

        - ``system``: ``None`` leaves it to the template, which may have a prompt of its own
          (``DEFAULT_SYSTEM``) for messages that do not start with one; a text, also an empty one,
          is put in front as a system message; ``False`` adds no block.
        - ``add_generation_prompt``: end with the start of an assistant's message.
        - ``continue_final``: the last message is an assistant's and is left open instead, up to
          its last character.
        - ``allow_special``: let the text of control tokens in messages become control tokens.

        Where nothing in the messages looks like a control token, the ids are those of the
        rendered text encoded in one go.

        Raises ``InputError`` for messages that are not a conversation, with their place, and
        ``TemplateError`` where the template cannot render them, or would make control tokens of
        what they say (by lower-casing it or by cutting something out, for example).
        """
        conversation = _conversation(messages, system, continue_final)
        shadow = Shadow.of(() if allow_special else tuple(tokenizer.special_tokens))
        if self._is_smollm2:
            _require_markup(tokenizer)
        said = [_changed(message, shadow.cast) for message in conversation]
        arguments = (system, add_generation_prompt, continue_final, tokenizer)
        pieces = tokenizer.split_special(self._text(said, *arguments))
        veiled = [_changed(message, shadow.veil) for message in said]
        if veiled != said and not self._is_smollm2:
            plain = tokenizer.split_special(self._text(veiled, *arguments))
            if _control_tokens(pieces) != _control_tokens(plain):
                raise TemplateError(_CHANGED)
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(tokenizer.encode(shadow.lift(piece)))
        return ids

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the control token that the template puts behind an assistant's message.

        There is none where the template does not render a question and its answer; why not is
        said when it renders a conversation.
        """
        probe: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "x"},
        ]
        try:
            whole, opened = (
                self._text(normalise(probe), None, False, is_open, tokenizer, _PROBE_SHARE)
                for is_open in (False, True)
            )
        except TemplateError:
            return frozenset()
        ending = whole[len(opened) :] if whole.startswith(opened) else ""
        return frozenset(_control_tokens(tokenizer.split_special(ending))[:1])

    def _text(
        self,
        conversation: list[dict[str, Any]],
        system: System,
        add_generation_prompt: bool,
        continue_final: bool,
        tokenizer: Tokenizer | None,
        share: int = 1,
    ) -> str:
        add_generation_prompt = add_generation_prompt and not continue_final
        if self._is_smollm2:
            return _smollm2(conversation, system, add_generation_prompt, continue_final)
        if system is False:
            raise InputError(
                "system=False works with SmolLM2's chat template only: what another one adds by "
                "itself is not known"
            )
        return self._foreign(conversation, add_generation_prompt, continue_final, tokenizer, share)

    def _foreign(
        self,
        conversation: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final: bool,
        tokenizer: Tokenizer | None,
        share: int,
    ) -> str:
        """Render any other template, in the sandbox."""
        from smollm2.template.sandbox import render

        if continue_final:
            last = conversation[-1]
            conversation = [*conversation[:-1], {**last, "content": last["content"] + _CONTINUED}]
        text = render(
            self.source,
            {
                "messages": conversation,
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **_token_texts(tokenizer),
            },
            share=share,
        )
        if not continue_final:
            return text
        if _CONTINUED not in text:
            raise TemplateError("the chat template leaves out the message to be continued")
        return text[: text.rindex(_CONTINUED)].replace(_CONTINUED, "")


def _conversation(
    messages: Sequence[Message], system: System, continue_final: bool
) -> list[dict[str, Any]]:
    """Check the messages and put the system message in front."""
    conversation = normalise(messages)
    if isinstance(system, str):
        if conversation and conversation[0]["role"] == "system":
            raise InputError(
                "system is given and messages[0] is a system message: leave one of them out"
            )
        conversation = [{"role": "system", "content": check_text(system, "system")}, *conversation]
    elif system is not None and system is not False:
        raise InputError(f"system is {system!r:.80}: it must be a text, None or False")
    if continue_final:
        last = conversation[-1] if conversation else {}
        if last.get("role") != "assistant" or "tool_calls" in last:
            raise InputError(
                "continue_final needs an assistant's message without tool calls at the end"
            )
    return conversation


def _smollm2(
    conversation: list[dict[str, Any]],
    system: System,
    add_generation_prompt: bool,
    continue_final: bool,
) -> str:
    """Render SmolLM2's template."""
    parts = []
    if system is None and conversation and conversation[0]["role"] != "system":
        parts.append(f"{_START}system\n{DEFAULT_SYSTEM}{_END}\n")
    for message in conversation:
        text = message["content"]
        if "tool_calls" in message:
            text += "\n" * bool(text) + tool_call_text(message["tool_calls"])
        parts.append(f"{_START}{message['role']}\n{text}{_END}\n")
    if continue_final:
        parts[-1] = parts[-1].removesuffix(f"{_END}\n")
    if add_generation_prompt:
        parts.append(f"{_START}assistant\n")
    return "".join(parts)


def _changed(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Change all texts that a stranger may have written: all but role and keys."""
    return {
        key: value if key == "role" else map_strings(value, change)
        for key, value in message.items()
    }


def _control_tokens(pieces: list[str | int]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


def _require_markup(tokenizer: Tokenizer) -> None:
    for token in (_START, _END):
        if token not in tokenizer.special_tokens:
            raise TemplateError(
                f"the tokenizer has no control token {token}, which this chat template writes"
            )


def _token_texts(tokenizer: Tokenizer | None) -> Mapping[str, str]:
    """Return ``bos_token`` and so on, as templates call them."""
    if tokenizer is None:
        return {}
    named = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    return {
        f"{name}_token": tokenizer.detokenize([token_id], skip_special=False)
        for name, token_id in named.items()
        if token_id is not None
    }
