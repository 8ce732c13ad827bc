"""Shard indexes: what opens, and each way in which an index and its shards can disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from smollm2.errors import FormatError
from smollm2.files import write_json
from smollm2.formats.safetensors import open_index, write_safetensors

INDEX = "model.safetensors.index.json"


def write_shard(folder: Path, shard: str, *names: str) -> None:
    write_safetensors(folder / shard, {name: np.full(2, len(name), "f4") for name in names})


def write_index(folder: Path, weight_map: Any) -> Path:
    write_json(folder / INDEX, {"metadata": {"total_size": 24}, "weight_map": weight_map})
    return folder / INDEX


def raises(path: Path, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        open_index(path)
    assert message in str(caught.value)
    assert str(path.parent) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# feature table: 136
def test_shards_come_in_the_order_of_the_index(tmp_path: Path) -> None:
    write_shard(tmp_path, "two.safetensors", "b", "ccc")
    write_shard(tmp_path, "one.safetensors", "aa")
    (tmp_path / "sub").mkdir()
    write_shard(tmp_path / "sub", "three.safetensors", "d")
    path = write_index(
        tmp_path,
        {
            "b": "two.safetensors",
            "aa": "one.safetensors",
            "ccc": "two.safetensors",
            "d": "sub/three.safetensors",
        },
    )
    files = open_index(path)
    assert [file.path.name for file in files] == [
        "two.safetensors",
        "one.safetensors",
        "three.safetensors",
    ]
    assert [list(file.entries) for file in files] == [["b", "ccc"], ["aa"], ["d"]]
    assert files[0].array("ccc").tolist() == [3, 3]


def test_shards_of_the_hub_cache_are_links_out_of_the_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    write_shard(tmp_path / "blobs", "0123abcd", "a")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/0123abcd")
    (file,) = open_index(write_index(snapshot, {"a": "model-1.safetensors"}))
    assert list(file.entries) == ["a"]


# cases: X6, X7; feature table: 138
@pytest.mark.parametrize(
    "shard",
    [
        "",
        ".",
        "..",
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "./outside.safetensors",
        "sub//outside.safetensors",
        "sub/",
        "/etc/passwd",
        "//host/share",
        "\\outside.safetensors",
        "..\\outside.safetensors",
        "sub\\outside.safetensors",
        "C:/outside.safetensors",
        "C:outside.safetensors",
        "c:\\outside.safetensors",
        "a.safetensors:stream",
        "outside\0.safetensors",
        "outside\n.safetensors",
    ],
)
def test_a_shard_is_named_inside_the_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    write_shard(tmp_path, "outside.safetensors", "a")
    write_shard(folder, "inside.safetensors", "b")
    path = write_index(folder, {"b": "inside.safetensors", "a": shard})
    raises(path, "is not the name of a file inside the folder")


# cases: W7
def test_all_shards_that_do_not_exist_are_listed(tmp_path: Path) -> None:
    write_shard(tmp_path, "one.safetensors", "a")
    (tmp_path / "folder.safetensors").mkdir()
    path = write_index(
        tmp_path,
        {
            "a": "one.safetensors",
            "b": "two.safetensors",
            "c": "three.safetensors",
            "d": "folder.safetensors",
            "e": "x" * 300,
        },
    )
    raises(path, f"two.safetensors, three.safetensors, folder.safetensors, {'x' * 300}")


# cases: W13
def test_a_shard_has_exactly_the_tensors_of_the_index(tmp_path: Path) -> None:
    write_shard(tmp_path, "one.safetensors", "a", "rotary_emb.inv_freq", "extra")
    path = write_index(
        tmp_path, {"a": "one.safetensors", "c": "one.safetensors", "b": "one.safetensors"}
    )
    raises(path, "missing: b, c; unexpected: extra, rotary_emb.inv_freq")
    path = write_index(tmp_path, {"a": "one.safetensors", "extra": "one.safetensors"})
    raises(path, "missing: none; unexpected: rotary_emb.inv_freq")


def test_a_long_list_of_tensors_is_cut(tmp_path: Path) -> None:
    write_shard(tmp_path, "one.safetensors", "a")
    names = [f"t{number:04}" for number in range(1000)]
    path = write_index(tmp_path, dict.fromkeys(["a", *names], "one.safetensors"))
    raises(path, "missing: t0000, t0001")
    raises(path, "t0099, and 900 more; unexpected: none")


# cases: W11
def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    write_shard(tmp_path, "one.safetensors", "a")
    raw = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "one.safetensors").write_bytes(raw[:-1])
    path = write_index(tmp_path, {"a": "one.safetensors"})
    raises(path, "one.safetensors: the file is cut short")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("[]", "a JSON object is needed"),
        ("{}", "weight_map must be an object"),
        ('{"weight_map": []}', "weight_map must be an object"),
        ('{"weight_map": ["a"]}', "weight_map must be an object"),
        ('{"weight_map": "a"}', "weight_map must be an object"),
        ('{"weight_map": null}', "weight_map must be an object"),
        ('{"weight_map": {}}', "weight_map must be an object"),
        ('{"weight_map": {"a": 1}}', "the shard of 'a' must be a string"),
        ('{"weight_map": {"a": ["one.safetensors"]}}', "the shard of 'a' must be a string"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' appears twice"),
        ('{"weight_map": {}, "weight_map": {}}', "'weight_map' appears twice"),
        ('{"weight_map": {"a": "\\ud800"}}', "not UTF-8"),
        ('{"weight_map": ' + "[" * 100_000, "nested too deep"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, raw: str, message: str) -> None:
    (tmp_path / INDEX).write_text(raw)
    raises(tmp_path / INDEX, message)


def test_an_index_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    raises(tmp_path / INDEX, "no such file")


@settings(max_examples=200, deadline=1000)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["one", "two", "three", "../one", "a\0", "x" * 5000]) | st.text(max_size=5),
    ),
    st.integers(0, 200),
    st.binary(max_size=4) | st.none(),
)
def test_any_index_opens_or_is_a_format_error(
    tmp_path_factory: pytest.TempPathFactory,
    weight_map: dict[str, str],
    place: int,
    patch: bytes | None,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    folder.mkdir(exist_ok=True)
    write_shard(folder, "one", "a")
    write_shard(folder, "two", "b", "c")
    raw = json.dumps({"weight_map": weight_map}).encode()
    if patch is not None:
        raw = raw[:place] + patch + raw[place + len(patch) :]
    (folder / INDEX).write_bytes(raw)
    try:
        files = open_index(folder / INDEX)
    except FormatError:
        return
    assert {file.path.name: list(file.entries) for file in files}.items() <= {
        "one": ["a"],
        "two": ["b", "c"],
    }.items()
