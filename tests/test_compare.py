"""benchmarks/compare.py: what is claimed, what records make of it, and the whole way with fakes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import compare
import engines
import pytest
from claims import CLAIMS, FIRST, OURS, Claim, Run, rows_of
from engines import Engines, RunError
from hypothesis import given, strategies as st
from modelfiles import ModelFiles
from outcomes import Record, outcome, read_records, table

from tests.fakes import write_byte_tokenizer
from tests.tiny import random_weights, tiny_config, write_gguf

US = Run(OURS, "tiny-Q8_0", decode=4)
THEM = replace(US, engine="llama_cpp")
OTHER = replace(US, engine="llama_cpp", model="tiny-Q4_0")
FASTER = Claim("row", "decode", "decode", US, (THEM, OTHER), 1.5, ("decode_of_read", 0.9))
SOONER = Claim("row", "first", "first_token_s", US, (THEM,), 0.8, ("first_token_s", 0.25))

PEER = """
import json, sys
print("words that are no JSON", file=sys.stderr)
print(json.dumps({"prefill": 10.0, "decode": 2.0, "arguments": sys.argv[1:]}))
"""


def record(number: int, run: Run, **result: float) -> Record:
    return Record("row", number, run, result, f"{run.engine} 1.0", "a machine", "2026-01-02")


def test_the_bars_are_those_of_the_targets(shared: Path) -> None:
    """Each row of the table has the ratios, and the shares in percent, of some rows of claims."""
    lines = (shared / "targets.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| work (2 threads")) + 2
    end = lines.index("", start)
    theirs = [
        {float(number) for number in re.findall(r"[≥≤] ([\d.]+)", line)}
        for line in lines[start:end]
    ]
    groups: dict[str, set[float]] = {}
    for claim in CLAIMS:
        group = groups.setdefault(re.sub("^(batch|360m|1.7b)-.*", r"\1", claim.row), set())
        group.add(claim.bar)
        if claim.own is not None:
            key, bar = claim.own
            group.add(round(100 * bar) if "_of_" in key else bar)
    assert groups.pop("threads-8") == {0.8}  # which is no row of that table
    assert [*groups.values()] == theirs


def test_a_round_has_each_run_once_and_ours_first() -> None:
    for row, runs in rows_of(CLAIMS).items():
        assert len(runs) == len(set(runs)), row
        assert runs[0].engine in (OURS, FIRST)
    assert [run.engine for run in rows_of(CLAIMS)["decode-8bit"]] == [
        OURS,
        "ik_llama",
        "llama_cpp",
    ]
    busy, quiet = rows_of(CLAIMS)["busy"]
    assert (busy.busy, quiet.busy) == (2, 0)
    assert replace(busy, busy=0) == quiet


def test_the_best_peer_of_each_round_counts() -> None:
    records = [
        *(record(n, US, decode=d, decode_of_read=0.8, read_gb_s=30) for n, d in enumerate((8, 9))),
        *(record(n, THEM, decode=d) for n, d in enumerate((4, 1))),
        *(record(n, OTHER, decode=d) for n, d in enumerate((2, 6))),
    ]
    result = outcome(FASTER, records)
    assert result is not None
    assert (result.rounds, result.ours, result.theirs) == (2, 8.5, 5)
    assert result.ratio == (8 / 4 + 9 / 6) / 2
    assert result.peer == OTHER
    assert (result.own, result.limit) == (0.8, 30)


def test_of_seconds_the_least_are_best() -> None:
    seconds = {US: 3.0, THEM: 4.0, OTHER: 2.0}
    records = [record(1, run, first_token_s=value) for run, value in seconds.items()]
    result = outcome(replace(SOONER, peers=(THEM, OTHER)), records)
    assert result is not None
    assert (result.peer, result.ratio, result.own) == (OTHER, 1.5, 3.0)


def test_rounds_that_miss_a_run_are_left_out() -> None:
    records = [record(1, US, decode=9), record(1, THEM, decode=3), record(2, US, decode=5)]
    assert outcome(FASTER, records) is None
    records += [record(2, THEM, decode=5), record(2, OTHER, decode=1)]
    result = outcome(FASTER, records)
    assert result is not None
    assert (result.rounds, result.ratio) == (1, 1)
    assert outcome(replace(FASTER, row="another"), records) is None


@given(st.lists(st.tuples(*[st.floats(0.01, 100)] * 2), min_size=1, max_size=9))
def test_the_ratio_is_the_median_of_those_of_the_rounds(pairs: list[tuple[float, float]]) -> None:
    """A drift that both have in a round does not move it."""
    for drift in (1, 7):
        records = []
        for number, (ours, theirs) in enumerate(pairs):
            factor = drift**number
            records.append(record(number, US, first_token_s=ours * factor))
            records.append(record(number, THEM, first_token_s=theirs * factor))
        result = outcome(SOONER, records)
        assert result is not None
        assert result.ratio == pytest.approx(median(a / b for a, b in pairs))


def test_the_table() -> None:
    records = [
        record(1, US, decode=1234, decode_of_read=0.85, read_gb_s=35.26, first_token_s=0.2),
        record(1, THEM, decode=500, first_token_s=0.4),
        record(1, OTHER, decode=600),
    ]
    text = table([FASTER, SOONER, replace(FASTER, row="another")], records)
    heading, empty, *lines = text.splitlines()
    assert heading.startswith("a machine; 2026-01-02; llama_cpp 1.0, smollm2 1.0. Medians of 1 ")
    assert empty == ""
    assert lines[2:] == [
        "| decode | 1,234 tokens/s | llama.cpp Q4_0 600 | 2.06 (≥ 1.5 ✓) "
        "| 85% of 35.3 GB/s (≥ 90% ✗) |",
        "| first | 0.2 s | llama.cpp 0.4 | 0.50 (≤ 0.8 ✓) | 0.2 s (≤ 0.25 s ✓) |",
    ]
    assert len({line.count("|") for line in lines}) == 1
    assert table([FASTER], []) == "Nothing was measured."


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    assert read_records(path) == []
    written = [record(1, US, decode=1.5), record(1, THEM, decode=2.5)]
    for each in written:
        each.write(path)
    assert read_records(path) == written


@pytest.fixture
def peers(tmp_path: Path) -> Engines:
    script = tmp_path / "peers.py"
    script.write_text(PEER, encoding="utf-8")
    here = Path(sys.executable)
    return Engines(ours=here, peers=here, peers_script=script, threads=1)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A GGUF file with a tokenizer, in place of the real one."""
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    config = tiny_config(vocab_size=260)
    return write_gguf(
        tmp_path / "real.gguf", config, random_weights(config), "Q8_0", tokenizer=tokenizer
    )


def test_a_peer_gets_the_options_of_the_benchmark(peers: Engines) -> None:
    run = replace(THEM, prompt=7, depth=3, batch=2, repeats=1)
    counts = {"prompt": 7, "decode": 4, "depth": 3, "batch": 2, "repeats": 1}
    options = [part for name, count in counts.items() for part in (f"--{name}", str(count))]
    result = peers.measure(run, Path("model.gguf"))
    assert result["decode"] == 2.0
    assert result["arguments"] == ["llama_cpp", "model.gguf", "--threads", "1", *options]
    assert peers.command(replace(run, threads=8), Path("m"))[4:6] == ["--threads", "8"]


def test_what_fails_is_said(peers: Engines) -> None:
    peers.peers_script.write_text("import sys; sys.exit('out of luck')", encoding="utf-8")
    with pytest.raises(RunError, match="ended with 1: out of luck"):
        peers.measure(THEM, Path("m"))
    with pytest.raises(RunError, match="ended with 1"):
        peers.measure(replace(THEM, engine="llama_cpp_first"), Path("m"))
    peers.peers_script.write_text("print('no')", encoding="utf-8")
    with pytest.raises(RunError, match="printed no JSON"):
        peers.measure(THEM, Path("m"))


def test_the_first_byte_is_waited_for(peers: Engines) -> None:
    """Time stops at the first byte, and memory is that of the whole process."""
    peers.peers_script.write_text(
        "import time; print(1, flush=True); time.sleep(0.5); x = b'x' * 500_000_000",
        encoding="utf-8",
    )
    started = time.perf_counter()
    result = peers.measure(replace(THEM, engine="llama_cpp_first"), Path("m"))
    seconds = time.perf_counter() - started
    assert 0 < result["first_token_s"] <= seconds - 0.5
    assert result["peak_mb"] > 450


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to look at")
def test_busy_processes_are_gone_afterwards(peers: Engines) -> None:
    before = children()
    peers.peers_script.write_text(
        "import json, os; from pathlib import Path\n"
        "group = Path(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read_text()\n"
        "print(json.dumps({'beside': len(group.split()) - 1}))",
        encoding="utf-8",
    )
    assert peers.measure(replace(THEM, busy=3), Path("m"))["beside"] == len(before) + 3
    assert children() == before


def children() -> set[str]:
    task = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(task.read_text(encoding="ascii").split())


def test_versions(peers: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.PACKAGES, "here", ("numpy", "numpy"))
    monkeypatch.setitem(engines.PACKAGES, "away", ("no_such_module", "no-such-package"))
    assert re.fullmatch(r"smollm2 \d.*", peers.version(OURS) or "")
    assert re.fullmatch(r"numpy \d.*", peers.version("here") or "")
    assert peers.version("away") is None


def test_files_are_made_when_they_are_needed(peers: Engines, real: Path, tmp_path: Path) -> None:
    files = ModelFiles(tmp_path / "work", peers, real)
    assert files.path("135M-Q4_1", "llama_cpp") == real
    smol = files.path("135M-Q4_1", OURS)
    assert smol.read_bytes()[:4] == b"SMOL"
    stamp = smol.stat().st_mtime_ns
    assert files.path("135M-Q4_1", FIRST) == smol
    assert smol.stat().st_mtime_ns == stamp
    files.keep_only({"135M-Q4_1"})
    assert smol.exists()
    files.keep_only({"360M-Q8_0"})
    assert not smol.exists()


def test_half_a_file_does_not_stay(peers: Engines, real: Path, tmp_path: Path) -> None:
    files = ModelFiles(tmp_path / "work", peers, real)
    peers.peers_script.write_text(
        "import sys; open(sys.argv[3], 'w').write('half'); sys.exit('no more')", encoding="utf-8"
    )
    with pytest.raises(RunError, match="no more"):
        files.path("135M-Q8_0", "llama_cpp")
    assert not (tmp_path / "work" / "135M-Q8_0.gguf").exists()


def test_a_full_disk_is_said_before(
    peers: Engines, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type("Usage", (), {"free": 2**20})()
    monkeypatch.setattr("modelfiles.shutil.disk_usage", lambda _: full)
    with pytest.raises(RunError, match=r"1\.7B-Q8_0\.gguf needs 4\.3 GB"):
        ModelFiles(tmp_path / "work", peers, real).path("1.7B-Q8_0", "openvino")


def test_the_whole_way(
    peers: Engines,
    real: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Ours measured in earnest against a fake, in two sittings; one peer is missing."""
    ours = Run(OURS, "135M-Q4_1", prompt=8, decode=2, repeats=1)
    row = [
        Claim("tiny", "decode", "decode", ours, (replace(ours, engine=engine),), 1.0)
        for engine in ("llama_cpp", "openvino")
    ]
    first = replace(ours, engine=FIRST)
    peer = replace(first, engine="llama_cpp_first")
    row.append(Claim("tiny", "first", "first_token_s", first, (peer,), 1.0))
    monkeypatch.setattr(compare, "CLAIMS", row)
    for engine in ("llama_cpp", "llama_cpp_first"):
        monkeypatch.setitem(engines.PACKAGES, engine, ("numpy", "numpy"))
    monkeypatch.setitem(engines.PACKAGES, "openvino", ("no_such_module", "openvino-genai"))
    out = tmp_path / "raw.jsonl"
    command = ["compare.py", "--gguf", str(real), "--out", str(out), "--threads", "1"]
    command += ["--peers-script", str(peers.peers_script), "--only", "tiny", "--rounds"]
    for rounds in (1, 2):
        monkeypatch.setattr(sys, "argv", [*command, str(rounds)])
        assert compare.main() == 0
    said = capsys.readouterr()
    assert "SKIPPED in tiny: OpenVINO" in said.err
    assert "no openvino-genai" in said.err
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [each["round"] for each in records] == [1] * 4 + [2] * 4 + [3] * 4
    engines_used = [each["run"]["engine"] for each in records[:4]]
    assert engines_used == [OURS, "llama_cpp", FIRST, "llama_cpp_first"]
    assert records[0]["result"]["decode"] > 0
    assert "Medians of 3 or more rounds" in said.out
    assert re.search(r"\| decode \| [\d.,]+ tokens/s \| llama.cpp 2 \|", said.out)
    assert "OpenVINO" not in said.out
