"""What a hub may answer instead of files, and how long we wait for one."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from smollm2.errors import DownloadError, InputError, OfflineError
from smollm2.registry import download
from smollm2.registry.download import Hub
from tests.fakehub import COMMIT, NEEDED, REPO, FakeHub, fake_hub


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with fake_hub() as hub:
        yield hub


def test_a_branch_becomes_a_commit(fake: FakeHub) -> None:
    snapshot = Hub(fake.endpoint).snapshot(REPO, "main")
    assert snapshot.commit == COMMIT
    assert {file.name for file in snapshot.files} == set(NEEDED)


@pytest.mark.parametrize(
    ("repo", "revision", "said"),
    [
        ("someone/nothing", "main", "someone/nothing does not exist .* private: .* HF_TOKEN"),
        (REPO, "no-such-branch", f"{REPO} has no revision no-such-branch at "),
        (REPO, "f" * 40, "has no revision ffff"),
    ],
)
def test_what_does_not_exist_is_named(fake: FakeHub, repo: str, revision: str, said: str) -> None:
    with pytest.raises(DownloadError, match=said):
        Hub(fake.endpoint).snapshot(repo, revision)


@pytest.mark.parametrize(
    ("status", "code", "token", "said"),
    [
        (401, None, None, "does not exist at .*, or is private: check the name, or set HF_TOKEN"),
        (401, None, "hf_x", "refuses the token .*401.*: check HF_TOKEN"),
        (401, "RepoNotFound", "hf_x", "does not exist"),
        (401, "GatedRepo", None, "is gated: accept its terms at .* and set HF_TOKEN"),
        (403, "GatedRepo", "hf_x", "is gated"),
        (403, None, "hf_x", "forbids access .*403.*: check HF_TOKEN"),
        (404, None, None, "does not exist"),
        (400, None, None, "HTTP status 400"),
        (429, None, None, "did not list .*HTTP status 429.*: try again"),
        (500, None, None, "did not list .*HTTP status 500.*: try again"),
    ],
)
def test_a_refusal_is_one_line_with_a_way_out(
    fake: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str | None,
    token: str | None,
    said: str,
) -> None:
    """feature 163"""
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    fake.refusal = (status, code)
    with pytest.raises(DownloadError, match=said) as raised:
        Hub(fake.endpoint).snapshot(REPO, COMMIT)
    text = str(raised.value)
    assert "\n" not in text
    assert REPO in text or fake.endpoint in text
    assert "hf_x" not in text


GOOD: dict[str, Any] = {"rfilename": "config.json", "size": 1}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>log in to this network</html>",
        b"[]",
        b"{}",
        b"\xff",
        b'{"sha": null, "siblings": []}',
        b'{"sha": "../../x", "siblings": []}',
        *(
            json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
            for siblings in (
                None,
                3,
                [None],
                ["config.json"],
                [{"size": 1}],
                [GOOD | {"rfilename": 1}],
                [GOOD | {"size": None}],
                [GOOD | {"size": -1}],
                [GOOD | {"size": "1"}],
                [GOOD | {"lfs": "sha256"}],
            )
        ),
    ],
)
def test_an_answer_that_is_no_hubs_names_the_endpoint(fake: FakeHub, answer: bytes) -> None:
    fake.answer = answer
    with pytest.raises(DownloadError, match=f"{fake.endpoint} .*: check HF_ENDPOINT") as raised:
        Hub(fake.endpoint).snapshot(REPO, COMMIT)
    assert "\n" not in str(raised.value)


def test_another_commit_than_the_pinned_one_is_refused(fake: FakeHub) -> None:
    """feature 112"""
    listing = json.loads(fake.listing())
    fake.answer = json.dumps(listing | {"sha": "a" * 40}).encode()
    with pytest.raises(DownloadError, match=f"commit {'a' * 40}, not {COMMIT}"):
        Hub(fake.endpoint).snapshot(REPO, COMMIT)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_repository_without_a_checkpoint_is_refused(fake: FakeHub, missing: str) -> None:
    del fake.files[missing]
    with pytest.raises(DownloadError, match=f"{REPO} holds no config.json with model.safetensors"):
        Hub(fake.endpoint).snapshot(REPO, COMMIT)


def test_names_that_lead_elsewhere_are_never_listed(fake: FakeHub) -> None:
    """cases: X7"""
    for name in ("../config.json", "/config.json", "a/config.json", "..\\config.json", "C:x.json"):
        fake.files[name] = b"{}"
    snapshot = Hub(fake.endpoint).snapshot(REPO, COMMIT)
    assert {file.name for file in snapshot.files} == set(NEEDED)


def test_a_hub_that_answers_is_reachable(fake: FakeHub) -> None:
    assert Hub(fake.endpoint).unreachable() is None


def test_a_port_where_nobody_listens_is_noticed_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    begin = time.monotonic()
    assert "refused" in (Hub(f"http://127.0.0.1:{port}").unreachable() or "").lower()
    assert time.monotonic() - begin < 2


def test_a_hub_that_never_answers_is_given_up_in_time(fake: FakeHub) -> None:
    fake.silent = True
    begin = time.monotonic()
    reason = Hub(fake.endpoint).unreachable(0.3)
    assert time.monotonic() - begin < 0.6
    assert reason is not None
    assert "timed out" in reason or "no answer within 0.3 seconds" in reason


def test_a_name_lookup_that_hangs_is_given_up_in_time(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: object, **__: object) -> list[Any]:
        fake.released.wait(20)
        raise socket.gaierror("nothing")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    begin = time.monotonic()
    assert Hub("http://hub.example").unreachable(0.3) == "no answer within 0.3 seconds"
    assert time.monotonic() - begin < 0.6


def test_three_seconds_are_the_longest_wait() -> None:
    assert download.PROBE_SECONDS <= 3


def test_what_the_client_cannot_send_is_a_reason(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "schlüssel")
    assert "ascii" in (Hub(fake.endpoint).unreachable() or "")


BAD_ENDPOINTS = [
    "hub",
    "hub.example",
    "ftp://hub.example",
    "https://",
    "http://[::1",
    "http://a b",
    "file:///x",
    "http://hub:0",
    "http://hub:99999",
    "http://hub\n.example",
    "http://hüb",
]


@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
def test_an_endpoint_must_be_a_url(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(InputError, match=re.escape(f"HF_ENDPOINT is {endpoint!r}")):
        Hub.from_environment()


def test_the_endpoint_is_read_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    assert Hub.from_environment().endpoint == "https://mirror.example/hub"
    monkeypatch.delenv("HF_ENDPOINT")
    assert Hub.from_environment().endpoint == "https://huggingface.co"


def test_a_library_that_was_loaded_offline_says_so(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineError, match="unset HF_HUB_OFFLINE"):
        Hub(fake.endpoint).snapshot(REPO, COMMIT)
    assert fake.requests == []
