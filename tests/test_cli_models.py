"""`pull`, `list`, `verify`, `show` and `tokenize`: for people, for pipes and as JSON."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from smollm2 import Tokenizer
from smollm2.cli import main
from smollm2.cli.loading import size_text
from smollm2.prepared import FILE
from smollm2.template import SMOLLM2_TEMPLATE
from tests.cli_session import Screen, write_model
from tests.fakehub import NEEDED, FakeHub, fake_hub
from tests.fakes import write_byte_tokenizer
from tests.tiny import random_weights, tiny_config, write_gguf

NAME = "smollm2-135m-instruct"
FILES = [*NEEDED]
Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.endpoint)
        yield fake


def fetched(err: str) -> list[str]:
    return [line.split()[1] for line in err.splitlines() if line.startswith("fetching ")]


def test_pull_in_a_pipe(hub: FakeHub, store: Path, capsys: Capture) -> None:
    """cases: feature 49: plain lines on stderr, the path on stdout; once is enough"""
    for options, names in ([], FILES), ([], []), (["--force"], FILES):
        assert main(["pull", NAME, *options]) == 0
        out, err = capsys.readouterr()
        path = Path(out.rstrip("\n"))
        assert path.is_relative_to(store)
        assert sorted(fetched(err)) == sorted(names)
        assert err.splitlines()[-1] == f"{NAME} is here: 1.0 MB from hub"
    assert (path / "model.safetensors").read_bytes() == NEEDED["model.safetensors"]


def test_a_broken_connection_is_one_line_still(hub: FakeHub, capsys: Capture) -> None:
    hub.cut["model.safetensors"] = 1
    assert main(["pull", NAME]) == 0
    assert sorted(fetched(capsys.readouterr().err)) == sorted(FILES)


def test_pull_in_a_terminal(hub: FakeHub, store: Path) -> None:
    hub.cut["model.safetensors"] = 1
    with Screen("pull", NAME, "--no-prepare") as screen:
        assert screen.exit_code() == 0
        *bars, said, path = screen.lines
    assert [bar.split()[0] for bar in bars] == FILES
    assert all("━" * 10 in bar for bar in bars)
    assert "1.0/1.0 MB" in bars[-1]
    assert said == f"{NAME} is here: 1.0 MB from hub"
    assert str(store) in path
    with Screen("pull", NAME, "--force", NO_COLOR="1") as screen:
        assert screen.exit_code() == 0
        assert "\x1b" not in screen.raw


def test_list(hub: FakeHub, capsys: Capture) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr() == ("", f"no models yet: try smollm2 pull {NAME}\n")
    main(["pull", NAME])
    path = Path(capsys.readouterr().out.rstrip("\n"))
    assert main(["list"]) == 0
    assert capsys.readouterr().out == f"{NAME}\t1.0 MB\tsafetensors\thub\t{path}\n"
    assert main(["list", "--json"]) == 0
    (described,) = json.loads(capsys.readouterr().out)
    assert described["name"] == NAME
    assert (described["path"], described["format"]) == (str(path), "safetensors")
    assert described["nbytes"] == sum(map(len, NEEDED.values()))
    with Screen("list") as screen:
        assert screen.exit_code() == 0
        assert screen.lines[0].split() == ["NAME", "SIZE", "FORMAT", "SOURCE", "PATH"]
        assert screen.lines[1].index("1.0 MB") == screen.lines[0].index("SIZE")
    (path / "config.json").unlink()
    assert main(["list"]) == 0
    assert f"{NAME} cannot be used: " in capsys.readouterr().err


def test_verify(hub: FakeHub, capsys: Capture) -> None:
    main(["pull", NAME])
    path = Path(capsys.readouterr().out.rstrip("\n"))
    assert main(["verify", NAME]) == 0
    out, err = capsys.readouterr()
    rows = [line.split("\t") for line in out.splitlines()]
    sizes = [["ok", name, size_text(len(content))] for name, content in NEEDED.items()]
    assert sorted(rows) == sorted(sizes)
    assert err == ""
    (path / "config.json").write_bytes(b"{'model_type': 'llama'}")
    assert main(["verify", NAME]) == 1
    digest = sha256((path / "config.json").read_bytes()).hexdigest()
    row = f"bad\tconfig.json\thas sha256 {digest[:12]}… instead of "
    assert row in capsys.readouterr().out
    assert main(["verify", NAME, "--json"]) == 1
    out, err = capsys.readouterr()
    assert all(check["detail"].startswith("sha256 ") for check in json.loads(out) if check["ok"])
    bad = [Path(check["path"]).name for check in json.loads(out) if not check["ok"]]
    assert bad == ["config.json"]
    assert err == (
        f"error: 1 of {len(FILES)} files of {NAME} are damaged: "
        f"smollm2 pull --force {NAME} fetches them again\n"
    )


def test_what_is_prepared_is_said_listed_and_verified(
    model: Path, hub: FakeHub, capsys: Capture
) -> None:
    hub.files = {file.name: file.read_bytes() for file in model.iterdir()}
    assert main(["pull", NAME]) == 0
    out, err = capsys.readouterr()
    smol = Path(out.rstrip("\n")) / FILE
    size = size_text(smol.stat().st_size)
    *_, preparing, here, prepared = err.splitlines()
    assert preparing.startswith(f"preparing {FILE} (")
    assert here.startswith(f"{NAME} is here: ")
    assert prepared == f"{FILE} is prepared: {size}"
    assert main(["list"]) == 0
    name, total, formats, *_ = capsys.readouterr().out.split("\t")
    assert (name, formats) == (NAME, "safetensors, smol")
    files = [file for file in smol.parent.iterdir() if file.name != "manifest.json"]
    assert total == size_text(sum(file.stat().st_size for file in files))
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["prepared"] == str(smol)
    assert main(["verify", NAME]) == 0
    assert f"ok\t{FILE}\t{size}\n" in capsys.readouterr().out
    raw = bytearray(smol.read_bytes())
    raw[-1] ^= 1
    smol.write_bytes(raw)
    assert main(["verify", NAME]) == 1
    out, err = capsys.readouterr()
    assert f"bad\t{FILE}\ttensor 'model.norm.weight' is damaged" in out
    assert err.endswith(f"are damaged: smollm2 pull {NAME} makes it again\n")
    assert main(["verify", str(smol)]) == 1
    assert capsys.readouterr().err.endswith("are damaged: smollm2 export writes it again\n")
    assert main(["pull", NAME]) == 0
    assert main(["verify", NAME]) == 0


def test_a_pull_need_not_prepare(model: Path, hub: FakeHub, capsys: Capture) -> None:
    hub.files = {file.name: file.read_bytes() for file in model.iterdir()}
    assert main(["pull", NAME, "--no-prepare"]) == 0
    out, err = capsys.readouterr()
    assert "prepar" not in err
    assert not (Path(out.rstrip("\n")) / FILE).exists()


def test_show(model: Path, capsys: Capture) -> None:
    assert main(["show", str(model)]) == 0
    facts = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    config = tiny_config(vocab_size=260)
    assert facts["parameters"] == f"{config.parameter_count:,}"
    assert facts["bits per weight"] == "32.00 (F32 32.00)"
    assert facts["context length"] == "256 tokens"
    assert (facts["format"], facts["source"]) == ("safetensors", "local")
    assert facts["heads"] == "4 query, 2 kv, 16 wide"
    assert facts["stop ids"] == "0 <|endoftext|>, 2 <|im_end|>"
    assert main(["show", str(model), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["parameters"] == config.parameter_count
    assert value["config"]["hidden_size"] == 64
    assert value["size_on_disk"] == sum(file.stat().st_size for file in model.iterdir())
    assert value["tokenizer"]["special_tokens"]["<|im_end|>"] == 2
    assert (value["stop_ids"], value["has_template"]) == ([0, 2], True)


def test_show_tensors_and_template(model: Path, capsys: Capture) -> None:
    assert main(["show", str(model), "--tensors"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == list(tiny_config().shapes)
    assert rows[0][1:] == ["F32", "260x64", str(260 * 64 * 4)]
    assert main(["show", str(model), "--tensors", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(rows)
    assert main(["show", str(model), "--template"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == SMOLLM2_TEMPLATE.rstrip("\n")


def test_bits_of_a_quantized_model(tmp_path: Path, capsys: Capture) -> None:
    """The real size: 4.5 bits of a Q4_0 matrix, the norms and all in the mean."""
    config = tiny_config(vocab_size=260)
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    weights = random_weights(config)
    path = write_gguf(tmp_path / "q4.gguf", config, weights, "Q4_0", tokenizer=tokenizer)
    assert main(["show", str(path), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    bits = described["bits_per_weight"]
    assert (described["format"], described["source"]) == ("gguf", "local")
    norms = sum(array.size for _, array in weights.items() if array.ndim == 1)
    share = norms / config.parameter_count
    assert (bits["Q4_0"], bits["F32"]) == (4.5, 32)
    assert np.isclose(bits["all"], 4.5 * (1 - share) + 32 * share)


def test_a_checkpoint_of_weights_alone(tmp_path: Path, capsys: Capture) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    assert main(["show", str(folder)]) == 0
    assert "tokenizer\tnone" in capsys.readouterr().out
    assert main(["show", str(folder), "--template"]) == 1
    assert "no chat template" in capsys.readouterr().err
    assert main(["tokenize", "-m", str(folder), "Ab"]) == 1
    assert "no tokenizer.json" in capsys.readouterr().err


def test_tokenize(model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(model)
    text = 'thö\n"<|im_end|>'
    ids = tokenizer.encode(text)
    assert main(["tokenize", "-m", str(model), text]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [int(row[0]) for row in rows] == ids
    assert [row[1] for row in rows[:5]] == ['"th"', r'"\xc3"', r'"\xb6"', r'"\n"', r'"\""']
    assert main(["tokenize", "-m", str(model), text, "--ids"]) == 0
    assert capsys.readouterr().out == " ".join(map(str, ids)) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["tokenize", "-m", str(model), "--json", "--allow-special"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["token_ids"] == tokenizer.encode(text, allow_special=True)
    assert value["pieces"][-1] == "<|im_end|>"
    assert value["roundtrips"] is True


def test_tokenize_counts_for_a_person(model: Path) -> None:
    for text, count in ("A", "1 token"), ("A b", "3 tokens"):
        with Screen("tokenize", "-m", model, text) as screen:
            assert screen.exit_code() == 0
            assert screen.lines[-1] == count


def test_where_a_model_is_from(model: Path, store: Path, capsys: Capture) -> None:
    """What was pulled has its revision; the home folder is ``~``, to a person alone."""
    folder = store / "models" / NAME
    folder.parent.mkdir(parents=True)
    shutil.copytree(model, folder)
    files = {
        file.name: {"size": len(content), "sha256": sha256(content).hexdigest()}
        for file in folder.iterdir()
        for content in [file.read_bytes()]
    }
    manifest = {
        "name": NAME,
        "source": "hub",
        "repo": "a/b",
        "revision": "0a1b2c3d",
        "files": files,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert main(["show", NAME]) == 0
    facts = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert (facts["source"], facts["path"]) == ("hub, revision 0a1b2c3d", str(folder))
    for command in ["list"], ["show", NAME]:
        with Screen(*command, HOME=str(store.parent)) as screen:
            assert screen.exit_code() == 0
            assert f"~/home/models/{NAME}" in "\n".join(screen.lines)
            assert str(folder) not in screen.raw


def test_a_store_that_cannot_be_read_does_not_matter(
    model: Path, store: Path, capsys: Capture
) -> None:
    store.write_text("", encoding="utf-8")
    assert main(["show", str(model)]) == 0
    assert "source\tlocal" in capsys.readouterr().out


@pytest.mark.weights
def test_a_text_that_does_not_come_back(real_gguf: Path, capsys: Capture) -> None:
    """The vocabulary of SmolLM2 lacks some bytes."""
    assert main(["tokenize", "-m", str(real_gguf), "a\x04b", "--ids"]) == 0
    assert "does not come back" in capsys.readouterr().err


def test_sizes_are_decimal() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 98_362_432: "98.4 MB", 3_400_000_000: "3.4 GB"}
    assert {nbytes: size_text(nbytes) for nbytes in sizes} == sizes
    assert size_text(999_999) == "1.0 MB"
