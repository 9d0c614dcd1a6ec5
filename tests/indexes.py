"""A package index served from a folder on 127.0.0.1, which can be told to fail. For tests only.

The folder holds a folder for each project (canonical name) with its files. Project pages are served under
``/simple/`` as PEP 503 HTML and PEP 691 JSON (with PEP 700 sizes and upload times), files under ``/files/`` with
ranges, and each wheel's PEP 658 metadata beside it. Use ``serve(folder)`` as a context manager; change the attributes
of the server, or add a ``Fault``, while it runs.
"""

from __future__ import annotations

import base64
import email
import hashlib
import html
import io
import json
import re
import socket
import struct
import sys
import tarfile
import threading
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from pathlib import Path

    from tests.wheelmaker import Made

JSON = "application/vnd.pypi.simple.v1+json"
HTML = "text/html"


@dataclass
class Fault:
    """What goes wrong for the next ``times`` requests whose path matches ``path`` (a glob, ``*/big-1.0-*.whl``).

    ``status`` answers with it (and ``retry_after`` seconds); ``cut`` closes the connection after so many bytes of the
    body, or with ``reset`` breaks it, and what is under way is lost; ``corrupt`` inverts the body's last byte; ``slow`` sleeps so many seconds before each 64 KiB.
    """

    path: str
    status: int | None = None
    retry_after: str | None = None
    cut: int | None = None
    reset: bool = False
    corrupt: bool = False
    slow: float = 0.0
    times: int = 1_000_000


@dataclass(frozen=True)
class Request:
    """A request that the server has seen."""

    method: str
    path: str
    range: str | None
    user_agent: str


@dataclass
class IndexServer:
    """The running index. Attributes may be changed at any time."""

    folder: Path
    port: int = 0
    json: bool = True
    metadata: bool = True
    ranges: bool = True
    hashes: bool = True
    credentials: tuple[str, str] | None = None
    tls: ssl.SSLContext | None = None
    yanked: dict[str, str] = field(default_factory=dict)
    uploaded: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        """The index's URL, without credentials."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://127.0.0.1:{self.port}/simple/"

    @property
    def url_with_credentials(self) -> str:
        user, password = self.credentials or ("", "")
        return self.url.replace("://", f"://{user}:{password}@")

    def add(self, *made: Made) -> None:
        """Publish wheels or source archives, under the project that their metadata names."""
        for one in made:
            project = canonical(_headers(one.metadata).get("Name", one.file.split("-")[0]))
            one.write(self.folder / project)

    def fail(self, path: str, **how: Any) -> Fault:
        """Add a fault and return it (``server.faults.remove(fault)`` ends it)."""
        fault = Fault(path, **how)
        self.faults.append(fault)
        return fault

    def paths(self, pattern: str = "*") -> list[str]:
        """Return the paths asked for so far that match."""
        return [request.path for request in self.requests if fnmatch(request.path, pattern)]

    def take_fault(self, path: str) -> Fault:
        """Return the fault in force for a path, counting it down; a harmless one when there is none."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fnmatch(path, fault.path):
                    fault.times -= 1
                    return fault
        return Fault(path)


@contextmanager
def serve(folder: Path, **attributes: Any) -> Iterator[IndexServer]:
    """Serve ``folder`` (made when absent) until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    state = IndexServer(folder, **attributes)

    class Handler(_Handler):
        index = state

    server = _Server(("127.0.0.1", 0), Handler)
    if state.tls is not None:
        server.socket = state.tls.wrap_socket(server.socket, server_side=True)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away: tests kill them."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    index: IndexServer
    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.index.requests.append(
            Request(self.command, path, self.headers.get("Range"), self.headers.get("User-Agent", ""))
        )
        fault = self.index.take_fault(path)
        try:
            self._answer(path, fault)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _answer(self, path: str, fault: Fault) -> None:
        if fault.status is not None:
            headers = {"Retry-After": fault.retry_after} if fault.retry_after is not None else {}
            self._send(fault.status, b"told to fail\n", "text/plain", fault, headers)
            return
        if self.index.credentials is not None and self.headers.get("Authorization") != _basic(self.index.credentials):
            self._send(401, b"who are you\n", "text/plain", fault, {"WWW-Authenticate": "Basic"})
            return
        parts = path.strip("/").split("/")
        if parts[0] == "simple" and not path.endswith("/"):
            self._send(301, b"", "text/plain", fault, {"Location": f"{path}/"})
        elif parts[0] == "simple" and len(parts) <= 2:
            body = self._page(parts[1] if len(parts) == 2 else None)
            kind = JSON if self._wants_json() else HTML
            self._send(404 if body is None else 200, body or b"no such project\n", kind, fault)
        elif parts[0] == "files" and len(parts) == 3:
            self._send_file(parts[1], parts[2], fault)
        else:
            self._send(404, b"no such page\n", "text/plain", fault)

    def _wants_json(self) -> bool:
        return self.index.json and JSON in self.headers.get("Accept", "")

    def _page(self, project: str | None) -> bytes | None:
        if project is None:
            names = sorted(path.name for path in self.index.folder.iterdir() if path.is_dir())
            if self._wants_json():
                return json.dumps({"meta": {"api-version": "1.1"}, "projects": [{"name": n} for n in names]}).encode()
            return _html("".join(f'<a href="{name}/">{name}</a><br/>\n' for name in names))
        folder = self.index.folder / project
        if not folder.is_dir():
            return None
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        if not self._wants_json():
            return _html("".join(self._anchor(project, path) for path in files))
        document = {
            "meta": {"api-version": "1.1"},
            "name": project,
            "versions": sorted({version_of(path.name) for path in files}),
            "files": [self._record(project, path) for path in files],
        }
        return json.dumps(document).encode()

    def _record(self, project: str, path: Path) -> dict[str, Any]:
        data = path.read_bytes()
        record: dict[str, Any] = {
            "filename": path.name,
            "url": f"../../files/{project}/{path.name}",
            "hashes": {"sha256": hashlib.sha256(data).hexdigest()} if self.index.hashes else {},
            "size": len(data),
            "upload-time": self.index.uploaded.get(path.name, "2025-01-01T00:00:00.000000Z"),
            "yanked": self.index.yanked.get(path.name, False),
        }
        metadata = core_metadata(path)
        if (requires_python := _headers(metadata).get("Requires-Python")) is not None:
            record["requires-python"] = requires_python
        if self.index.metadata and path.suffix == ".whl":
            record["core-metadata"] = {"sha256": hashlib.sha256(metadata).hexdigest()}
        return record

    def _anchor(self, project: str, path: Path) -> str:
        record = self._record(project, path)
        digest = record["hashes"].get("sha256")
        href = record["url"] + (f"#sha256={digest}" if digest else "")
        attributes = [f'href="{html.escape(href)}"']
        if "requires-python" in record:
            attributes.append(f'data-requires-python="{html.escape(record["requires-python"])}"')
        if record["yanked"] is not False:
            attributes.append(f'data-yanked="{html.escape(str(record["yanked"]))}"')
        if "core-metadata" in record:
            attributes.append(f'data-core-metadata="sha256={record["core-metadata"]["sha256"]}"')
        return f"<a {' '.join(attributes)}>{html.escape(path.name)}</a><br/>\n"

    def _send_file(self, project: str, name: str, fault: Fault) -> None:
        path = self.index.folder / project / name
        if path.is_file():
            self._send(200, path.read_bytes(), "application/octet-stream", fault)
        elif name.endswith(".metadata") and self.index.metadata and path.with_suffix("").is_file():
            self._send(200, core_metadata(path.with_suffix("")), "application/octet-stream", fault)
        else:
            self._send(404, b"no such file\n", "text/plain", fault)

    def _send(self, status: int, body: bytes, kind: str, fault: Fault, more: dict[str, str] | None = None) -> None:
        headers = {"Content-Type": kind, **(more or {})}
        if status == 200 and self.index.ranges and kind == "application/octet-stream":
            headers["Accept-Ranges"] = "bytes"
            status, body, extra = _ranged(self.headers.get("Range"), body)
            headers |= extra
        if fault.corrupt and body:
            body = body[:-1] + bytes([body[-1] ^ 0xFF])
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(body, fault)

    def _send_body(self, body: bytes, fault: Fault) -> None:
        if fault.cut is not None:
            self.wfile.write(body[: fault.cut])
            self.wfile.flush()
            if fault.reset:  # linger of zero: close() sends RST and drops what is not sent yet
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            raise ConnectionResetError
        step = 65536 if fault.slow else max(1, len(body))
        for start in range(0, len(body), step):
            if fault.slow:
                time.sleep(fault.slow)
            self.wfile.write(body[start : start + step])


def _ranged(header: str | None, body: bytes) -> tuple[int, bytes, dict[str, str]]:
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if match is None or match[0] == "bytes=-":
        return 200, body, {}
    if match[1] == "":
        start, end = max(0, len(body) - int(match[2])), len(body) - 1
    else:
        start, end = int(match[1]), min(int(match[2] or len(body)), len(body) - 1)
    if start >= len(body) or start > end:
        return 416, b"", {"Content-Range": f"bytes */{len(body)}"}
    return 206, body[start : end + 1], {"Content-Range": f"bytes {start}-{end}/{len(body)}"}


def _basic(credentials: tuple[str, str]) -> str:
    return "Basic " + base64.b64encode(":".join(credentials).encode()).decode()


def _html(body: str) -> bytes:
    return f"<!DOCTYPE html>\n<html><body>\n{body}</body></html>\n".encode()


def core_metadata(path: Path) -> bytes:
    """Return METADATA of a wheel or PKG-INFO of a source archive; empty when there is none."""
    data = path.read_bytes()
    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                names = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
                return archive.read(names[0]) if names else b""
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                if re.fullmatch(r"[^/]+/PKG-INFO", member.name) and (file := tar.extractfile(member)) is not None:
                    return file.read()
    except (zipfile.BadZipFile, tarfile.TarError):
        pass
    return b""


def version_of(file: str) -> str:
    """Return the version in a wheel's or source archive's file name."""
    if file.endswith(".whl"):
        return file.split("-")[1]
    return re.sub(r"\.(tar\.gz|zip)$", "", file).rpartition("-")[2]


def _headers(metadata: bytes) -> dict[str, str]:
    return dict(email.message_from_bytes(metadata).items())
