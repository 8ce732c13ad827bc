"""Text to token ids and back, exactly as the checkpoint's files declare it."""

from smollm2.tokenizer.compact import COMPACT, compact_form
from smollm2.tokenizer.stream_decoder import StreamDecoder
from smollm2.tokenizer.tokenizer import FILES as TOKENIZER_FILES, Tokenizer, check_text

__all__ = [
    "COMPACT",
    "TOKENIZER_FILES",
    "StreamDecoder",
    "Tokenizer",
    "check_text",
    "compact_form",
]
