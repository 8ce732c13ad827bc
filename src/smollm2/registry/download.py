"""Fetching the files of a checkpoint from a model hub, each checked before it is kept."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from smollm2._version import __version__
from smollm2.errors import ChecksumError, DownloadError, FormatError, InputError, OfflineError
from smollm2.files import parse_json, sha256_of
from smollm2.registry.progress import Progress

PROBE_SECONDS = 3.0
_TIMEOUT = 10.0  # seconds for one connect or one read
_RETRY_DELAYS = (0.2, 1.0, 3.0)  # seconds before each new connection that follows a broken one
_DEFAULT_ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# All that a checkpoint needs; pickles, ONNX files and whatever else a repository holds stay there.
_WANTED = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json"
    r"|special_tokens_map\.json|chat_template\.jinja|model\.safetensors\.index\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors"
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it: ``size`` in bytes, and at most one of two digests.

    ``sha256`` is given for large files, ``git_sha1`` (the id of a git blob) for the others.
    """

    name: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a repository that a checkpoint needs, at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]


class Hub:
    """A Hugging Face hub or a mirror of it, at ``endpoint`` (an http or https URL).

    Tokens, proxies and certificates are those of ``huggingface_hub``, whose HTTP session is used.
    Its ``hf_hub_download`` is not: it starts a file again from zero when a run was interrupted.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = _checked_endpoint(endpoint)

    @classmethod
    def from_environment(cls) -> Hub:
        """The hub that ``HF_ENDPOINT`` names now, or the public one."""
        return cls(os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT)

    def unreachable(self, seconds: float = PROBE_SECONDS) -> str | None:
        """Why the hub cannot be reached, or None; known after ``seconds`` at the latest.

        A name lookup cannot be interrupted, so the question is asked in a thread that may be
        left behind.
        """
        answers: list[str | None] = []

        def ask() -> None:
            try:
                with self._open("HEAD", self.endpoint, timeout=seconds) as response:
                    status = response.status_code
                answers.append(f"HTTP status {status}" if status >= 500 or status == 407 else None)
            except (DownloadError, OSError, ValueError) as error:
                answers.append(str(error))

        thread = threading.Thread(target=ask, name="smollm2-probe", daemon=True)
        thread.start()
        thread.join(seconds)
        return answers[0] if answers else f"no answer within {seconds:g} seconds"

    def snapshot(self, repo: str, revision: str) -> Snapshot:
        """What ``repo`` holds at ``revision`` (a commit, branch or tag).

        Raises ``DownloadError`` when there is no such thing, or it is no checkpoint.
        """
        url = f"{self.endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        try:
            with self._open("GET", url) as response:
                self._check_status(response, repo, revision)
                body = response.read()
        except _BrokenConnectionError as error:
            raise DownloadError(
                f"{self.endpoint} did not list {repo} ({error}): try again"
            ) from None
        try:
            commit, files = _listing(parse_json(body, url))
        except (FormatError, LookupError, TypeError, AttributeError) as error:
            raise DownloadError(
                f"{self.endpoint} does not answer like a model hub ({error}): check HF_ENDPOINT"
            ) from None
        if _COMMIT.fullmatch(revision) and commit != revision:
            raise DownloadError(f"{self.endpoint} answers with commit {commit}, not {revision}")
        names = {file.name for file in files}
        if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
            raise DownloadError(
                f"{repo} holds no config.json with model.safetensors: "
                "only checkpoints in that form can be pulled"
            )
        return Snapshot(repo, commit, files)

    def fetch(self, snapshot: Snapshot, file: RemoteFile, folder: Path, progress: Progress) -> str:
        """Put a file of a snapshot into ``folder`` and return its SHA-256.

        It gets its name once it is checked. What an interrupted run left behind is continued; a
        file that arrives damaged is fetched a second time.

        Raises ``ChecksumError`` when it is damaged again, ``DownloadError`` for the rest.
        """
        target = folder / file.name
        if target.exists():
            if _damage(target, file) is None:
                return file.sha256 or sha256_of(target)
            target.unlink()
        part = folder / f"{file.name}.part"
        for attempt in (1, 2):
            self._receive(snapshot, file, part, progress)
            damage = _damage(part, file)
            if damage is None:
                part.replace(target)
                return file.sha256 or sha256_of(target)
            part.unlink(missing_ok=True)
            if attempt == 1:
                progress.note(f"{file.name} arrived damaged ({damage}): fetching it again")
        raise ChecksumError(
            f"{file.name} of {snapshot.repo} from {self.endpoint} {damage}: "
            "try again later, or from another HF_ENDPOINT"
        )

    def beginning(self, snapshot: Snapshot, file: RemoteFile, count: int) -> bytes:
        """The first ``count`` bytes of a file of a snapshot, or all where it has fewer."""
        count = min(count, file.size)
        data, reason = b"", "it sent no more"
        chunk: bytes
        try:
            with self._open(
                "GET", self._url(snapshot, file), {"Range": f"bytes=0-{count - 1}"}
            ) as response:
                self._check_status(response, snapshot.repo, snapshot.commit)
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) >= count:
                        return data[:count]
        except _BrokenConnectionError as error:
            reason = str(error)
        raise DownloadError(
            f"{self.endpoint} broke off {file.name} at {len(data)} of {count} bytes ({reason}): "
            "try again"
        )

    def _receive(
        self, snapshot: Snapshot, file: RemoteFile, part: Path, progress: Progress
    ) -> None:
        """Fill ``part``, over as many connections as it takes."""
        broken = 0
        while (before := _size(part)) != file.size:
            if before > file.size:
                part.unlink()
            try:
                self._append(snapshot, file, part, progress)
                return
            except _BrokenConnectionError as error:
                here = _size(part)
                broken = 1 if here > before else broken + 1
                if broken > len(_RETRY_DELAYS):
                    raise DownloadError(
                        f"{self.endpoint} broke off {file.name} at {here} of {file.size} bytes "
                        f"({error}): run the same again to continue"
                    ) from None
                time.sleep(_RETRY_DELAYS[broken - 1])

    def _append(self, snapshot: Snapshot, file: RemoteFile, part: Path, progress: Progress) -> None:
        """Add to ``part`` what one connection brings; one that brings too much is left early."""
        offset = max(_size(part), 0)
        url = self._url(snapshot, file)
        span = {"Range": f"bytes={offset}-"} if offset else {}
        with self._open("GET", url, span) as response:
            if response.status_code == 416:  # a range past the end of what the hub has
                return
            self._check_status(response, snapshot.repo, snapshot.commit)
            if response.status_code != 206:
                offset = 0
            progress.start(file.name, file.size)
            progress.advance(offset)
            try:
                with part.open("ab" if offset else "wb") as out:
                    for chunk in response.iter_bytes():
                        out.write(chunk)
                        offset += len(chunk)
                        progress.advance(len(chunk))
                        if offset > file.size:
                            return
                    out.flush()
                    os.fsync(out.fileno())
            finally:
                progress.finish()

    def _url(self, snapshot: Snapshot, file: RemoteFile) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(
            snapshot.repo, file.name, revision=snapshot.commit, endpoint=self.endpoint
        )

    @contextmanager
    def _open(
        self,
        method: str,
        url: str,
        headers: dict[str, str] | None = None,
        timeout: float = _TIMEOUT,
    ) -> Iterator[Any]:
        """A streamed response; what the HTTP library raises becomes an error of this package."""
        from huggingface_hub import get_session, get_token
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        # The root of the HTTP library's errors. huggingface_hub changed that library once.
        transport_error: type[Any] = HfHubHTTPError.__bases__[0]
        # No compression: a continued file must count the same bytes as the first part of it.
        sent = {"User-Agent": f"smollm2/{__version__}", "Accept-Encoding": "identity"}
        if token := get_token():
            sent["Authorization"] = f"Bearer {token}"
        try:
            with get_session().stream(
                method, url, headers=sent | (headers or {}), timeout=timeout
            ) as response:
                yield response
        except OfflineModeIsEnabled:
            raise OfflineError(
                f"{self.endpoint} is needed, but huggingface_hub was loaded in offline mode: "
                "unset HF_HUB_OFFLINE and start again"
            ) from None
        except transport_error as error:
            raise _BrokenConnectionError(str(error) or type(error).__name__) from error

    def _check_status(self, response: Any, repo: str, revision: str) -> None:
        """Raise ``DownloadError`` unless a response brings what was asked for."""
        status: int = response.status_code
        if status < 300:
            return
        if status >= 500 or status in (408, 429):
            raise _BrokenConnectionError(f"HTTP status {status}")
        reason = response.headers.get("X-Error-Code")
        token_sent = "Authorization" in response.request.headers
        if reason == "GatedRepo":
            text = f"{repo} is gated: accept its terms at {self.endpoint}/{repo} and set HF_TOKEN"
        elif reason == "RevisionNotFound":
            text = f"{repo} has no revision {revision} at {self.endpoint}"
        elif reason == "EntryNotFound":
            text = f"{repo} at {revision} lost a file while it was pulled: try again"
        elif status == 401 and token_sent and reason != "RepoNotFound":
            text = f"{self.endpoint} refuses the token (HTTP status 401): check HF_TOKEN"
        elif status in (401, 404):
            text = (
                f"{repo} does not exist at {self.endpoint}, or is private: "
                "check the name, or set HF_TOKEN"
            )
        elif status == 403:
            text = f"{self.endpoint} forbids access to {repo} (HTTP status 403): check HF_TOKEN"
        else:
            text = f"{self.endpoint} answers with HTTP status {status} for {repo}"
        raise DownloadError(text)


class _BrokenConnectionError(DownloadError):
    """A connection failed or ended early; another one may work."""


def _checked_endpoint(endpoint: str) -> str:
    """An endpoint without a slash at its end, or ``InputError``."""
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        valid = valid and re.search(r"[^!-~]", endpoint) is None
    except ValueError:
        valid = False
    if not valid:
        raise InputError(f"HF_ENDPOINT is {endpoint!r}: give a URL that starts with https://")
    return endpoint.rstrip("/")


def _listing(answer: dict[str, Any]) -> tuple[str, tuple[RemoteFile, ...]]:
    """The commit and the wanted files in the hub's description of a repository."""
    commit = answer["sha"]
    if not _COMMIT.fullmatch(commit):
        raise LookupError("no commit")
    files = []
    for entry in answer["siblings"]:
        if not _WANTED.fullmatch(entry["rfilename"]):
            continue
        large = entry.get("lfs") or {}
        size = large.get("size", entry.get("size"))
        if not isinstance(size, int) or size < 0:
            raise LookupError(f"no size for {entry['rfilename']}")
        sha256 = large.get("sha256")
        # For a large file, the blob is a pointer: its id says nothing about the content.
        git_sha1 = None if large else entry.get("blobId")
        files.append(RemoteFile(entry["rfilename"], size, sha256, git_sha1))
    return commit, tuple(files)


def _size(path: Path) -> int:
    """The size of a file, or -1 where there is none."""
    return path.stat().st_size if path.exists() else -1


def _damage(path: Path, file: RemoteFile) -> str | None:
    """What is wrong with the content of ``path``, or None."""
    size = max(_size(path), 0)
    if size > file.size:
        return f"has more than the {file.size} bytes that are listed"
    if size < file.size:
        return f"has {size} bytes instead of the {file.size} that are listed"
    if file.sha256 is not None and (got := sha256_of(path)) != file.sha256:
        return f"has sha256 {got} instead of {file.sha256}"
    if file.git_sha1 is not None:
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        digest.update(path.read_bytes())
        if digest.hexdigest() != file.git_sha1:
            return f"has git id {digest.hexdigest()} instead of {file.git_sha1}"
    return None
