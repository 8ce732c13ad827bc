"""A model hub on loopback: the routes that clients use, with faults to switch on."""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMIT = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
NEEDED = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}' * 50,
    "tokenizer_config.json": b"{}\n",
    "special_tokens_map.json": b"{ }",
    "model.safetensors": random.Random(2).randbytes(1_000_001),
}
OTHERS = {
    "README.md": b"# SmolLM2",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"onnx",
    "runs/model.safetensors": b"another",
}


@dataclass
class FakeHub:
    """What the hub holds, which faults it has, and what it was asked."""

    endpoint: str = ""
    repo: str = REPO
    commit: str = COMMIT
    files: dict[str, bytes] = field(default_factory=lambda: NEEDED | OTHERS)
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)  # replaces parts of an entry
    answer: bytes | None = None  # replaces the whole listing
    refusal: tuple[int, str | None] | None = None  # status and X-Error-Code for the listing
    damage: Counter[str] = field(default_factory=Counter)  # name -> times that a byte is flipped
    cut: Counter[str] = field(default_factory=Counter)  # name -> times that half is sent
    busy: Counter[str] = field(default_factory=Counter)  # name -> times that status 503 is sent
    stall: str | None = None  # the file that is once sent by half and then no further
    ranges: bool = True
    silent: bool = False  # accept and never answer
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)  # name -> bytes sent

    def gets(self, name: str) -> list[dict[str, str]]:
        """The headers of each request for the content of a file, in order."""
        return [h for method, path, h in self.requests if (method, path) == ("GET", f"/cdn/{name}")]

    def listing(self) -> bytes:
        if self.answer is not None:
            return self.answer
        entries = []
        for name, content in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content)}
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(content).hexdigest()
                entry["blobId"] = "0" * 40
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            else:
                entry["blobId"] = git_sha1(content)
            entries.append(entry | self.listed.get(name, {}))
        return json.dumps({"id": self.repo, "sha": self.commit, "siblings": entries}).encode()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, dict(self.headers)))
        if hub.silent:
            hub.released.wait(20)
            self.close_connection = True
        elif path == "/":
            self._send(200, b"hub")
        elif re.fullmatch(rf"/api/models/{hub.repo}/revision/(main|{hub.commit})", path):
            status, reason = hub.refusal or (200, None)
            self._send(status, hub.listing(), {"X-Error-Code": reason} if reason else {})
        elif path.startswith("/api/models/"):
            known = path.startswith(f"/api/models/{hub.repo}/")
            reason = "RevisionNotFound" if known else "RepoNotFound"
            self._send(404, b"{}", {"X-Error-Code": reason})
        elif match := re.fullmatch(rf"/{hub.repo}/resolve/{hub.commit}/(.+)", path):
            self._resolve(match[1])
        elif path.startswith("/cdn/"):
            self._content(path.removeprefix("/cdn/"))
        else:
            self._send(404, b"")

    def _resolve(self, name: str) -> None:
        """As the real hub does, send content from another host."""
        content = self.hub.files.get(name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(content).hexdigest()
        headers = {
            "Location": f"{self.hub.endpoint.replace('127.0.0.1', 'localhost')}/cdn/{name}",
            "X-Repo-Commit": self.hub.commit,
            "X-Linked-Etag": f'"{etag}"',
            "X-Linked-Size": str(len(content)),
        }
        self._send(302, b"", headers)

    def _content(self, name: str) -> None:
        hub = self.hub
        content = hub.files[name]
        if hub.busy[name] > 0:
            hub.busy[name] -= 1
            self._send(503, b"")
            return
        if hub.damage[name] > 0:
            hub.damage[name] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked or not hub.ranges:
            asked = None
        start = int(asked[1]) if asked else 0
        if start and start >= len(content):
            self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        part = content[start : int(asked[2]) + 1 if asked and asked[2] else None]
        self.send_response(206 if asked else 200)
        if asked:
            last = start + len(part) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self._body(name, part)

    def _body(self, name: str, body: bytes) -> None:
        hub = self.hub
        half = body[: len(body) // 2]
        if hub.cut[name] > 0:
            hub.cut[name] -= 1
            body = half
            self.close_connection = True
        elif hub.stall == name:
            hub.stall = None
            self.wfile.write(half)
            hub.stalled.set()
            hub.released.wait(20)
            body = b""
            self.close_connection = True
        self.wfile.write(body)
        hub.served[name] += len(body)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A running hub on a free port."""
    from huggingface_hub import close_session

    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with _Server(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            close_session()
            server.shutdown()
            thread.join()


class RecordedProgress:
    """Keeps what it is told: remarks, and for each start its name, total and bytes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.files: list[tuple[str, int | None, int]] = []
        self.running = False

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, name: str, total: int | None, verb: str = "fetching") -> None:
        assert not self.running
        self.running = True
        self.files.append((name, total, 0))

    def advance(self, count: int) -> None:
        assert self.running
        assert count >= 0
        name, total, done = self.files[-1]
        self.files[-1] = (name, total, done + count)

    def finish(self) -> None:
        assert self.running
        self.running = False
