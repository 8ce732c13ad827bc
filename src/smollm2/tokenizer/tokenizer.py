"""Tokenizer: text → token ids and back, over the ``tokenizers`` library.

It does what tokenizer.json declares and nothing besides: no token is ever added in front of or
behind a text, and the text of a special token becomes its id only when that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex

from smollm2.errors import FormatError, InputError, TokenizerError
from smollm2.files import atomic_write, json_bytes, parse_json
from smollm2.tokenizer.compact import COMPACT, expand_form
from smollm2.tokenizer.declaration import BYTE_OF, build, declared_by_gguf
from smollm2.tokenizer.stream_decoder import StreamDecoder

if TYPE_CHECKING:
    from tokenizers import AddedToken

_NAMED = ("bos", "eos", "pad")  # the special tokens that have a task
_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_TOKENS_MAP, _TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
FILES = (_FILE, _CONFIG, _TOKENS_MAP, _TEMPLATE)
"""Files of a folder that belong to a tokenizer; only the first has to be there."""
_GGUF_NAMED = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}


class Tokenizer:
    """Text ⇄ token ids. Safe to share between threads.

    ``declaration`` is the content of a tokenizer.json, ``source`` its name in errors, ``named``
    the ids or texts of the ``bos``, ``eos`` and ``pad`` token. ``files`` are the files that it
    came from, by name; ``save`` writes them back unchanged.

    ``special_tokens`` are the control tokens, text → id.
    """

    def __init__(
        self,
        declaration: Mapping[str, Any],
        *,
        source: str,
        named: Mapping[str, int | str | None] | None = None,
        chat_template: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._libraries = build(declaration, source)
        self._files = dict(files or {})
        self._bytes: dict[int, bytes] = {}
        added = sorted(self._libraries.plain.get_added_tokens_decoder().items())
        self._controls = {token.content: token for _, token in added if token.special}
        self._pattern = _pattern_of(self._controls.values())
        self.special_tokens: Mapping[str, int] = MappingProxyType(
            {token.content: token_id for token_id, token in added if token.special}
        )
        self._special_ids = frozenset(self.special_tokens.values())
        # A model may stand for unknown characters with a control token; else text makes none.
        unknown = self.special_tokens.get(declaration["model"].get("unk_token"))
        self._never_text = self._special_ids - {unknown}
        self.chat_template = chat_template
        self.bos_id, self.eos_id, self.pad_id = (
            self._named_id(name, (named or {}).get(name), source) for name in _NAMED
        )

    @classmethod
    def from_file(cls, path: Path | str) -> Tokenizer:
        """Open a tokenizer.json alone: no bos, eos or pad id and no chat template.

        Raises ``FormatError`` for a file that is not JSON, ``TokenizerError`` for a tokenizer
        that is broken or not byte-level BPE.
        """
        raw = _read(Path(path))
        return cls(parse_json(raw, str(path)), source=str(path), files={_FILE: raw})

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Open a folder with a tokenizer.json.

        Where they exist, tokenizer_config.json and special_tokens_map.json name the bos, eos and
        pad token and the chat template; a chat_template.jinja goes before theirs.

        Raises ``FormatError`` and ``TokenizerError`` as ``from_file`` does.
        """
        paths = {name: Path(folder) / name for name in FILES}
        return cls.from_files(
            {name: _read(path) for name, path in paths.items() if name == _FILE or path.is_file()},
            folder,
        )

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], where: Path | str) -> Tokenizer:
        """Open the files of a folder by their content; ``where`` names the folder in errors.

        They may hold the compact form of tokenizer.json, which is read instead.
        """
        paths = {name: Path(where) / name for name in FILES}
        form = files.get(COMPACT)
        files = {name: files[name] for name in FILES if name in files}
        parsed = {
            name: parse_json(files[name], str(paths[name])) if name in files else {}
            for name in (_CONFIG, _TOKENS_MAP)
        }
        if form is None:
            declaration = parse_json(files[_FILE], str(paths[_FILE]))
        else:
            declaration = expand_form(form, files[_FILE], str(Path(where) / COMPACT))
        template = _declared_template(parsed[_CONFIG], paths[_CONFIG])
        if _TEMPLATE in files:
            template = _text(files[_TEMPLATE], paths[_TEMPLATE])
        return cls(
            declaration,
            source=str(paths[_FILE]),
            named={
                name: _declared_token(name, parsed[_CONFIG], parsed[_TOKENS_MAP]) for name in _NAMED
            },
            chat_template=template,
            files=files,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Make the tokenizer that the metadata of a GGUF file describes.

        Raises ``TokenizerError`` for a kind that is not supported: see ``declared_by_gguf``.
        """
        template = metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise TokenizerError("tokenizer.chat_template is not a string")
        return cls(
            declared_by_gguf(metadata),
            source="GGUF metadata",
            named={name: metadata.get(key) for name, key in _GGUF_NAMED.items()},
            chat_template=template,
        )

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self._libraries.vocab_size

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, which ``detokenize`` does not show."""
        return token_id in self._special_ids

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Encode a text. Nothing is put in front of it or behind it.

        With ``allow_special`` the text of a control token such as ``<|im_end|>`` becomes its id;
        without, it is text like any other, whoever wrote it. A character whose bytes are not in
        the vocabulary is dropped, as the library does: ``can_roundtrip`` tells.

        Raises ``InputError`` for a text with half a surrogate pair, which no bytes stand for.
        """
        check_text(text, "the text")
        if allow_special:
            return self._libraries.parsing.encode(text, add_special_tokens=False).ids
        ids = self._libraries.plain.encode(text, add_special_tokens=False).ids
        if not self._never_text.isdisjoint(ids):
            raise TokenizerError(
                "this tokenizer makes a control token of plain text: its merges are not safe"
            )
        return ids

    def split_special(self, text: str) -> list[str | int]:
        """Cut a text at its control tokens: their ids, and the non-empty texts between them.

        Encoding the texts without ``allow_special`` gives the ids of ``encode(text,
        allow_special=True)``.
        """
        pieces: list[str | int] = []
        place = 0
        for match in self._pattern.finditer(text):
            token = self._controls[match[0]]
            before = text[place : match.start()]
            pieces.append(before.rstrip() if token.lstrip else before)
            pieces.append(self.special_tokens[match[0]])
            place = match.end("space" if token.rstrip else 0)
        pieces.append(text[place:])
        return [piece for piece in pieces if piece != ""]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which need not be whole characters.

        Empty for an id inside the vocabulary that no token has. Raises ``InputError`` for an id
        outside of it.
        """
        if type(token_id) is int and token_id in self._bytes:
            return self._bytes[token_id]
        if not isinstance(token_id, SupportsIndex) or not 0 <= int(token_id) < self.vocab_size:
            raise InputError(
                f"token id {token_id!r} is not in the vocabulary: ids are whole numbers from 0 to "
                f"{self.vocab_size - 1}"
            )
        token = self._libraries.plain.id_to_token(token_id) or ""
        try:
            data = bytes(BYTE_OF[character] for character in token)
        except KeyError:  # an added token is written as it is
            data = token.encode()
        self._bytes[int(token_id)] = data
        return data

    def detokenize(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of some ids, without control tokens unless ``skip_special`` is off.

        Bytes that are not UTF-8 become U+FFFD. Raises ``InputError`` for an id outside the
        vocabulary.
        """
        bytes_of = self._shown_bytes if skip_special else self.token_bytes
        return b"".join(map(bytes_of, ids)).decode("utf-8", "replace")

    def stream_decoder(self, *, skip_special: bool = True) -> StreamDecoder:
        """Detokenize one id at a time: the pieces together equal ``detokenize``."""
        return StreamDecoder(self._shown_bytes if skip_special else self.token_bytes)

    def can_roundtrip(self, text: str) -> bool:
        """Whether the ids of the text give it back exactly.

        They do not where the vocabulary lacks a byte: SmolLM2 lacks 21 of 256, all rare.
        """
        return self.detokenize(self.encode(text), skip_special=False) == text

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        if _FILE in self._files:
            return self._files[_FILE].decode()
        return self._libraries.parsing.to_str()

    def files(self) -> dict[str, bytes]:
        """Return tokenizer.json and tokenizer_config.json by name, and what else it came from.

        Files that the tokenizer came from are as they were. Those that it did not come from are
        made so that transformers loads them with the same ids.
        """
        files = {_FILE: self.to_json().encode()} | self._files
        if _CONFIG not in files:
            files[_CONFIG] = json_bytes(self._config())
        return files

    def save(self, folder: Path | str) -> None:
        """Write ``files()`` into a folder, made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files().items():
            with atomic_write(folder / name) as file:
                file.write(data)

    def _config(self) -> dict[str, Any]:
        """Return what tokenizer_config.json says beside tokenizer.json."""
        # Named after the one class that takes the splitting from tokenizer.json as it is.
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        for name, token_id in zip(_NAMED, (self.bos_id, self.eos_id, self.pad_id), strict=True):
            if token_id is not None:
                config[f"{name}_token"] = self._libraries.plain.id_to_token(token_id)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return config

    def _named_id(self, name: str, token: int | str | None, source: str) -> int | None:
        """Return the id of a token with a task, which must exist where one is named."""
        if token is None:
            return None
        library = self._libraries.plain
        token_id = library.token_to_id(token) if isinstance(token, str) else token
        if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"{source}: the {name} token {token!r} is not in the vocabulary")
        return token_id

    def _shown_bytes(self, token_id: int) -> bytes:
        data = self.token_bytes(token_id)
        return b"" if token_id in self._special_ids else data


def check_text(text: str, where: str) -> str:
    """Return a text, if it is one that bytes can stand for; ``where`` names it in errors.

    Raises ``InputError`` for something else and for half a surrogate pair.
    """
    if not isinstance(text, str):
        raise InputError(f"{where} is of type {type(text).__name__}, not a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} has half a surrogate pair, {text[error.start]!r}, at character "
            f"{error.start}: pair it, or leave it out"
        ) from None
    return text


def _pattern_of(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Return what finds these tokens as the library does: leftmost, then longest."""
    alternatives = []
    for token in sorted(tokens, key=lambda token: len(token.content), reverse=True):
        text = re.escape(token.content)
        alternatives.append(rf"(?<!\w){text}(?!\w)" if token.single_word else text)
    return re.compile(rf"(?:{'|'.join(alternatives) or '(?!)'})(?=(?P<space>\s*))")


def _declared_template(config: Mapping[str, Any], path: Path) -> str | None:
    """Return the one chat template, or the ``default`` of a named list."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        default = (entry.get("template") for entry in named if entry.get("name") == "default")
        template = next(default, None)
    if not isinstance(template, str | None):
        raise TokenizerError(f"{path}: chat_template is not a string or a list of named ones")
    return template


def _declared_token(name: str, *configs: Mapping[str, Any]) -> Any:
    """Return the text of the bos, eos or pad token, from the first of the configs that has one."""
    for config in configs:
        token = config.get(f"{name}_token")
        if token is not None:
            return token.get("content") if isinstance(token, dict) else token
    return None


def _text(raw: bytes, path: Path) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 at byte {error.start}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
