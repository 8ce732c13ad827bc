"""StreamDecoder: token ids one at a time → pieces of text made of whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns the ids of one completion into text as they come.

    A character may be spread over several tokens, and a token may end in the middle of one, so
    bytes, not tokens, are held back until their character is complete. All pieces together with
    ``flush()`` are the text that ``Tokenizer.detokenize`` gives for all ids, whatever the ids:
    bytes that are not UTF-8 become U+FFFD in both.

    ``bytes_of`` gives the bytes of an id, empty for an id that is not to be shown.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take one id; return the characters that it completes, possibly none.

        Raises ``InputError`` for an id outside the vocabulary; what was held stays held.
        """
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """End the text: return U+FFFD for an unfinished character, and be ready for a new one."""
        return self._decoder.decode(b"", final=True)
