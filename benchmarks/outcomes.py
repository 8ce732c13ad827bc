"""Outcomes: what the records of runs make of the claims, and the table of that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from claims import Claim, Run

NAMES: Mapping[str, str] = {
    "llama_cpp": "llama.cpp",
    "llama_cpp_first": "llama.cpp",
    "ik_llama": "ik_llama.cpp",
    "openvino": "OpenVINO",
}
"""Peers as runs name them, and as people do."""

_UNITS = {"first_token_s": "s", "peak_mb": "MB"}
_RATE = "tokens/s"
_LIMITS = {"decode_of_read": ("read_gb_s", "GB/s"), "prefill_of_dot": ("dot_gmac_s", "GMAC/s")}
_HEADER = ("work", "ours", "peer", "ratio", "of what the machine can")


@dataclass(frozen=True, slots=True)
class Record:
    """What a run has given in a round of a row; ``result`` has the keys of the peers' script."""

    row: str
    round: int
    run: Run
    result: Mapping[str, Any]
    version: str
    machine: str
    date: str

    def write(self, path: Path) -> None:
        """Add a line to a file."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def read_records(path: Path) -> list[Record]:
    """What a file of records holds; nothing where there is none."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Record(**{**line, "run": Run(**line["run"])}) for line in lines]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians over ``rounds``; the ratio is the median of those of each round.

    ``peer`` is the best one. ``own`` and ``limit`` are None where the claim has none, or they
    were not found.
    """

    rounds: int
    ours: float
    peer: Run
    theirs: float
    ratio: float
    own: float | None
    limit: float | None


def outcome(claim: Claim, records: Iterable[Record]) -> Outcome | None:
    """What a claim comes to; rounds that miss ours or a peer are left out, None if all do."""
    rounds: dict[int, dict[Run, Mapping[str, Any]]] = {}
    for record in records:
        if record.row == claim.row:
            rounds.setdefault(record.round, {})[record.run] = record.result
    needed = (claim.ours, *claim.peers)
    whole = [results for results in rounds.values() if all(run in results for run in needed)]
    if not whole:
        return None

    def each(run: Run, key: str) -> list[float]:
        return [results[run][key] for results in whole if results[run].get(key) is not None]

    def middle(key: str | None) -> float | None:
        values = each(claim.ours, key) if key else []
        return median(values) if values else None

    best = min if claim.figure in _UNITS else max
    ours = each(claim.ours, claim.figure)
    theirs = [
        best(of_round)
        for of_round in zip(*(each(peer, claim.figure) for peer in claim.peers), strict=True)
    ]
    own = claim.own[0] if claim.own else None
    return Outcome(
        rounds=len(whole),
        ours=median(ours),
        peer=best(claim.peers, key=lambda peer: median(each(peer, claim.figure))),
        theirs=median(theirs),
        ratio=median(a / b for a, b in zip(ours, theirs, strict=True)),
        own=middle(own),
        limit=middle(_LIMITS[own][0] if own in _LIMITS else None),
    )


def table(claims: Iterable[Claim], records: Sequence[Record]) -> str:
    """The claims that were measured as a Markdown table, below what it was measured on."""
    found = [(claim, outcome(claim, records)) for claim in claims]
    measured = [(claim, result) for claim, result in found if result is not None]
    if not measured:
        return "Nothing was measured."
    fewest = min(result.rounds for _, result in measured)
    rows = (_cells(claim, result) for claim, result in measured)
    return "\n".join(
        [
            f"{_heading(records)} Medians of {fewest} or more rounds, in which all took turns.",
            "",
            f"| {' | '.join(_HEADER)} |",
            "|---" * len(_HEADER) + "|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def _heading(records: Sequence[Record]) -> str:
    machines = " and ".join(dict.fromkeys(record.machine for record in records))
    dates = sorted({record.date for record in records})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{machines}; {days}; {', '.join(sorted({record.version for record in records}))}."


def _cells(claim: Claim, result: Outcome) -> Iterator[str]:
    lower = claim.figure in _UNITS
    yield claim.work
    yield f"{_number(result.ours)} {_UNITS.get(claim.figure, _RATE)}"
    yield f"{_name(result.peer, claim)} {_number(result.theirs)}"
    yield f"{result.ratio:.2f} {_judged(result.ratio, claim.bar, f'{claim.bar:g}', lower=lower)}"
    if claim.own is None or result.own is None:
        yield ""
        return
    key, bar = claim.own
    if key in _LIMITS and result.limit is not None:
        of = f"{result.own:.0%} of {_number(result.limit)} {_LIMITS[key][1]}"
        yield f"{of} {_judged(result.own, bar, f'{bar:.0%}', lower=False)}"
    else:
        unit = _UNITS[key]
        shown = _judged(result.own, bar, f"{bar:g} {unit}", lower=True)
        yield f"{_number(result.own)} {unit} {shown}"


def _name(peer: Run, claim: Claim) -> str:
    """The peer, with its kind of weights where it is another than ours."""
    if peer.engine == claim.ours.engine:
        return "without"
    kind = "" if peer.model == claim.ours.model else f" {peer.model.partition('-')[2]}"
    return f"{NAMES[peer.engine]}{kind}"


def _judged(value: float, bar: float, shown: str, *, lower: bool) -> str:
    reached = value <= bar if lower else value >= bar
    return f"({'≤' if lower else '≥'} {shown} {'✓' if reached else '✗'})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
