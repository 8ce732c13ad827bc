"""Claims: what is measured against whom, and the ratios to be reached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

OURS, FIRST = "smollm2", "smollm2_first"
"""Our engine by ``smollm2 bench``, and as ``smollm2 run`` starts."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process that measures; the counts are the options of ``smollm2 bench``.

    ``threads`` 0 means as many as the comparison asks for. ``busy`` processes spin beside it.
    """

    engine: str
    model: str
    prompt: int = 512
    decode: int = 128
    depth: int = 0
    batch: int = 1
    repeats: int = 3
    threads: int = 0
    busy: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """That a figure of ``ours`` is better by a ratio than that of the best of ``peers``.

    ``bar`` is the least ratio; for seconds and bytes it is the largest. ``own`` names another
    figure of ours and its bar: a share of the machine's limit, or seconds.
    """

    row: str
    work: str
    figure: str
    ours: Run
    peers: tuple[Run, ...]
    bar: float
    own: tuple[str, float] | None = None


def rows_of(claims: Iterable[Claim]) -> dict[str, list[Run]]:
    """The runs of each row, each once and ours first: one round of it."""
    rows: dict[str, dict[Run, None]] = {}
    for claim in claims:
        rows.setdefault(claim.row, {}).update(dict.fromkeys((claim.ours, *claim.peers)))
    return {row: [*runs] for row, runs in rows.items()}


_SHARES = {"decode": "decode_of_read", "prefill": "prefill_of_dot"}
_SHORT = 16
"""Tokens of a prompt that is read where only decode counts."""


def _against(
    row: str, work: str, figure: str, ours: Run, bars: Mapping[str, float], share: float = 0
) -> Iterator[Claim]:
    """A claim against each of some engines that run the same."""
    own = (_SHARES[figure], share) if share else None
    for engine, bar in bars.items():
        yield Claim(row, work, figure, ours, (replace(ours, engine=engine),), bar, own)


def _decode(
    row: str, work: str, model: str, bars: Mapping[str, float], share: float, *, tokens: int = 128
) -> Iterator[Claim]:
    ours = Run(OURS, model, prompt=_SHORT, decode=tokens)
    return _against(row, work, "decode", ours, bars, share)


def _prefill(
    row: str, work: str, model: str, bars: Mapping[str, float], share: float = 0, **counts: int
) -> Iterator[Claim]:
    ours = Run(OURS, model, **{"decode": 4, "repeats": 2, **counts})
    return _against(row, work, "prefill", ours, bars, share)


def _batch(rows: int, tokens: int, bar: float) -> Claim:
    """Against the better of two kinds of weights."""
    ours = Run(OURS, "135M-Q8_0", prompt=_SHORT, decode=tokens, batch=rows)
    peer = replace(ours, engine="llama_cpp")
    peers = (peer, replace(peer, model="135M-Q4_0"))
    return Claim(f"batch-{rows}", f"decode, batch {rows}, sum", "decode", ours, peers, bar)


def _first(row: str, work: str, figure: str, tokens: int, bar: float, limit: float = 0) -> Claim:
    """Of a process that opens a model and answers; the peer's stops after one token."""
    peer = Run("llama_cpp_first", "135M-Q8_0", prompt=5, decode=1, repeats=1)
    ours = replace(peer, engine=FIRST, decode=tokens)
    return Claim(row, work, figure, ours, (peer,), bar, (figure, limit) if limit else None)


_USUAL = Run(OURS, "135M-Q8_0", repeats=2)


def _beside_itself(row: str, work: str, changed: Run, bar: float) -> Iterator[Claim]:
    """Against our own figures on a quiet machine with threads as they should be."""
    for figure in ("prefill", "decode"):
        yield Claim(row, f"{figure} {work}", figure, changed, (_USUAL,), bar)


_Q8, _Q4 = "135M-Q8_0", "135M-Q4_0"
_DECODERS = {"ik_llama": 1.08, "llama_cpp": 1.5}
_READERS = {"openvino": 1.35, "llama_cpp": 3.3}
_DEEP = Run(OURS, _Q8, prompt=_SHORT, decode=64, depth=4096, repeats=1)

CLAIMS: Sequence[Claim] = (
    *_decode("decode-8bit", "decode, 8 bit", _Q8, _DECODERS, 0.90),
    *_decode("decode-4bit", "decode, 4 bit, 8-bit head", _Q4, _DECODERS, 0.86),
    *_decode("decode-q4_1", "decode, the Q4_1 file", "135M-Q4_1", {"llama_cpp": 1.8}, 0.83),
    *_prefill("prefill-512", "prefill 512, 8 bit", _Q8, _READERS, 0.57, repeats=3),
    *_prefill("prefill-4096", "prefill 4096, 8 bit", _Q8, {"openvino": 1.35}, prompt=4096),
    *_against("depth-4096", "decode at context 4096", "decode", _DEEP, {"llama_cpp": 2.2}),
    _batch(8, 64, 2.5),
    _batch(32, 32, 3.5),
    *_decode("360m-decode", "360M, decode", "360M-Q8_0", {"ik_llama": 1.05}, 0.90, tokens=64),
    *_prefill("360m-prefill", "360M, prefill 512", "360M-Q8_0", {"openvino": 1.35}),
    *_decode("1.7b-decode", "1.7B, decode", "1.7B-Q8_0", {"ik_llama": 1.0}, 0.93, tokens=16),
    *_prefill("1.7b-prefill", "1.7B, prefill 512", "1.7B-Q8_0", {"openvino": 1.35}, repeats=1),
    _first("first-token", "process start → first token", "first_token_s", 1, 0.8, 0.25),
    _first("memory", "peak memory, 100 tokens", "peak_mb", 100, 0.7),
    *_beside_itself("busy", "beside two busy processes", replace(_USUAL, busy=2), 0.45),
    *_beside_itself("threads-8", "with 8 threads", replace(_USUAL, threads=8), 0.8),
)
"""All claims, in the order of the table; those of one row are measured together, turn by turn."""
