"""The HTTP side of ``tests.registry.fake``: what the distribution specification says, and the faults."""

from __future__ import annotations

import base64
import json
import re
import socket
import ssl
import struct
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from envbuilder.oci.digest import Digest
from envbuilder.oci.model import INDEX, canonical_json
from tests.registry.fake import FakeRegistry, Fault, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROUTE = re.compile(r"/v2/(?P<name>.+?)/(?P<kind>blobs/uploads|blobs|manifests|tags|referrers)/(?P<what>[^/]*)")
_PIECE = 1 << 16
#: What is asked for without ``tokens``.
CHALLENGE = 'Basic realm="tests"'


class _Handler(BaseHTTPRequestHandler):
    registry: FakeRegistry
    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def send_error(self, *_args: object, **_more: object) -> None:
        """Answer to what is no HTTP, such as the greeting of TLS, by hanging up."""
        self.close_connection = True

    def _seen(self) -> Request:
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        return Request(self.command, parts.path, parts.query, headers)

    def _query(self, name: str) -> str | None:
        values = parse_qs(urlsplit(self.path).query).get(name)
        return values[0] if values else None

    def _send(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, fault: Fault | None = None
    ) -> None:
        fault = fault or Fault("")
        if fault.cut == -1:
            self._break(reset=fault.reset)
        body = body if fault.body is None else fault.body
        if fault.corrupt and body:
            body = body[:-1] + bytes([body[-1] ^ 0xFF])
        body = body[: len(body) - fault.short]
        headers = {"Content-Length": str(len(body)), **(headers or {})}
        if fault.digest is not None and "Docker-Content-Digest" in headers:
            headers["Docker-Content-Digest"] = fault.digest
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.cut is not None:
            self.wfile.write(body[: fault.cut])
            self.wfile.flush()
            self._break(reset=fault.reset)
        step = 100 if fault.drip else _PIECE if fault.slow else max(1, len(body))
        for start in range(0, len(body), step):
            if fault.slow or fault.drip:
                time.sleep(fault.slow or fault.drip)
            self.wfile.write(body[start : start + step])

    def _break(self, *, reset: bool) -> None:
        if reset:  # linger of zero: close() sends RST and drops what is not sent yet
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        raise ConnectionResetError

    def _send_ranged(self, body: bytes, headers: dict[str, str], fault: Fault) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self.registry.ranges else None
        if found is None:
            self._send(200, body, headers, fault)
            return
        start, end = int(found[1]), min(int(found[2] or len(body)), len(body) - 1)
        if start >= len(body):
            self._send(416, b"", {"Content-Range": f"bytes */{len(body)}"}, fault)
            return
        headers = {**headers, "Content-Range": f"bytes {start}-{end}/{len(body)}"}
        self._send(206, body[start : end + 1], headers, fault)


class ObjectHandler(_Handler):
    """Where blobs are redirected to: another host, which must not be told who we are at the registry."""

    def do_GET(self) -> None:
        self.registry.object_requests.append(self._seen())
        try:
            if "Authorization" in self.headers:
                self._send(400, b"only one kind of authentication is allowed")
                return
            _, _, name, digest = urlsplit(self.path).path.split("/", 3)
            data = self.registry.blobs[name.replace("~", "/")][digest]
            self._send_ranged(
                data, {"Content-Type": "application/octet-stream"}, self.registry.take_fault(f"GET {self.path}")
            )
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815 (http.server's name)


class RegistryHandler(_Handler):
    """The registry's end points."""

    def _answer(self) -> None:
        seen = self._seen()
        self.registry.requests.append(seen)
        fault = self.registry.take_fault(seen.line)
        self._left = int(self.headers.get("Content-Length") or 0)
        try:
            self._respond(seen, fault)
            self._take_body(self._left)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 (http.server's names)

    def _respond(self, seen: Request, fault: Fault) -> None:
        if fault.status is not None:
            more = {"Retry-After": fault.retry_after} if fault.retry_after is not None else {}
            self._error(fault.status, fault.code, fault.message, more)
            return
        if seen.path == "/token":
            self._token(fault)
            return
        found = _ROUTE.fullmatch(seen.path)
        if found is None and seen.path.rstrip("/") != "/v2":
            self._send(404, b"404 page not found\n", {"Content-Type": "text/plain"})
            return
        name = found["name"] if found else ""
        if not self._allowed(name):
            return
        if found is None:
            self._send(200, b"{}", {"Content-Type": "application/json"}, fault)
            return
        kind = found["kind"].replace("/", "_")
        getattr(self, f"_{kind}")(name, found["what"], fault)

    # Who may come in.

    def _allowed(self, name: str) -> bool:
        registry, sent = self.registry, self.headers.get("Authorization", "")
        action = "pull" if self.command in {"GET", "HEAD"} and "/blobs/uploads/" not in self.path else "push"
        if registry.credentials is None and registry.identity_token is None and not registry.tokens:
            return True
        if not registry.tokens:
            if sent == self._basic():
                return True
            challenge = CHALLENGE
        else:
            if registry.allows(sent.removeprefix("Bearer "), name, action):
                return True
            actions = "pull" if action == "pull" else "pull,push"
            scope = f',scope="repository:{name}:{actions}"' if name else ""
            challenge = f'Bearer realm="{self._origin()}/token",service="tests"{scope}'
        self._error(401, "UNAUTHORIZED", "authentication required", {"WWW-Authenticate": challenge})
        return False

    def _token(self, fault: Fault) -> None:
        registry = self.registry
        if self.command == "POST":
            form = parse_qs(self._take_body(self._left).decode())
            scopes = frozenset(form.get("scope", [""])[0].split())
            fine = registry.identity_token is not None and form.get("refresh_token") == [registry.identity_token]
        else:
            scopes = frozenset(parse_qs(urlsplit(self.path).query).get("scope", []))
            sent = self.headers.get("Authorization")
            fine = registry.credentials is None or sent == self._basic()
            if sent is None and registry.anonymous:
                fine, scopes = True, frozenset(f"{scope.rpartition(':')[0]}:pull" for scope in scopes)
        if not fine:
            self._error(401, "UNAUTHORIZED", "incorrect username or password")
            return
        key = "access_token" if self.command == "POST" else "token"
        answer = {key: registry.new_token(scopes), "expires_in": registry.token_seconds}
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, fault)

    def _basic(self) -> str:
        user, password = self.registry.credentials or ("", "")
        return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    def _origin(self) -> str:
        return f"{'http' if self.registry.tls is None else 'https'}://{self.registry.address}"

    # Content.

    def _blobs(self, name: str, digest: str, fault: Fault) -> None:
        data = self.registry.blobs.get(name, {}).get(digest)
        if data is None:
            self._error(404, "BLOB_UNKNOWN", "blob unknown to registry")
        elif self.registry.redirects:
            url = f"http://{self.registry.objects}/objects/{name.replace('/', '~')}/{digest}?signature=hush"
            self._send(307, b"", {"Location": url}, fault)
        else:
            headers = {"Content-Type": "application/octet-stream", "Docker-Content-Digest": digest}
            self._send_ranged(data, headers, fault)

    def _manifests(self, name: str, target: str, fault: Fault) -> None:
        if self.command == "PUT":
            self._put_manifest(name, target, fault)
            return
        digest = target if ":" in target else self.registry.tags.get(name, {}).get(target, "")
        found = self.registry.manifests.get(name, {}).get(digest)
        if found is None:
            self._error(404, "MANIFEST_UNKNOWN", "manifest unknown")
            return
        headers = {"Content-Type": found[0]}
        if self.registry.states_digest:
            headers["Docker-Content-Digest"] = digest
        self._send(200, found[1], headers, fault)

    def _put_manifest(self, name: str, target: str, fault: Fault) -> None:
        data, registry = self._take_body(self._left), self.registry
        digest = Digest.of(data)
        try:
            document = json.loads(data)
        except ValueError:
            self._error(400, "MANIFEST_INVALID", "not JSON")
            return
        if ":" in target and target != str(digest):
            self._error(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
            return
        if registry.checks_manifests and (lacking := self._lacking(name, document)):
            self._error(404, "MANIFEST_BLOB_UNKNOWN", f"blob unknown: {lacking[0]}")
            return
        registry.add_manifest(name, data, None if ":" in target else target, self.headers["Content-Type"])
        headers = {"Location": f"/v2/{name}/manifests/{digest}", "Docker-Content-Digest": str(digest)}
        if registry.referrers and document.get("subject"):
            headers["OCI-Subject"] = document["subject"]["digest"]
        self._send(201, b"", headers, fault)

    def _lacking(self, name: str, document: dict[str, Any]) -> list[str]:
        blobs = [document["config"], *document["layers"]] if "layers" in document else []
        lacking = [part["digest"] for part in blobs if part["digest"] not in self.registry.blobs.get(name, {})]
        known = self.registry.manifests.get(name, {})
        return lacking + [m["digest"] for m in document.get("manifests", []) if m["digest"] not in known]

    def _tags(self, name: str, _what: str, fault: Fault) -> None:
        if name not in self.registry.manifests:
            self._error(404, "NAME_UNKNOWN", "repository name not known to registry")
            return
        last, most = self._query("last") or "", min(self.registry.page, int(self._query("n") or 1000))
        tags = sorted(tag for tag in self.registry.tags.get(name, {}) if tag > last)
        headers = {"Content-Type": "application/json"}
        if len(tags) > most:
            headers["Link"] = f'</v2/{name}/tags/list?n={most}&last={tags[most - 1]}>; rel="next"'
        self._send(200, json.dumps({"name": name, "tags": tags[:most] or None}).encode(), headers, fault)

    def _referrers(self, name: str, digest: str, fault: Fault) -> None:
        if not self.registry.referrers:
            self._send(404, b"404 page not found\n", {"Content-Type": "text/plain"})
            return
        found, headers = self.registry.referring(name, digest), {"Content-Type": INDEX}
        if (kind := self._query("artifactType")) is not None:
            found = [entry for entry in found if entry["artifactType"] == kind]
            headers["OCI-Filters-Applied"] = "artifactType"
        start, most = int(self._query("from") or 0), self.registry.page
        if len(found) > start + most:
            query = f"from={start + most}" + (f"&artifactType={kind.replace('+', '%2B')}" if kind else "")
            headers["Link"] = f'<{self._origin()}/v2/{name}/referrers/{digest}?{query}>; rel="next"'
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": found[start : start + most]}
        self._send(200, canonical_json(index), headers, fault)

    # Uploads.

    def _blobs_uploads(self, name: str, session: str, fault: Fault) -> None:
        registry = self.registry
        if self.command == "POST":
            self._begin_upload(name, fault)
            return
        arrived = registry.uploads.get(session)
        if arrived is None:
            self._error(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
        elif self.command == "GET":
            self._send(204, b"", self._session(name, session), fault)
        elif self.command == "PATCH":
            self._patch(name, session, arrived, fault)
        elif self.command == "PUT":
            self._receive(arrived, fault)
            self._end_upload(name, session, arrived, fault)
        else:
            del registry.uploads[session]
            self._send(204, b"", {}, fault)

    def _begin_upload(self, name: str, fault: Fault) -> None:
        registry, digest, source = self.registry, self._query("mount"), self._query("from")
        data = registry.blobs.get(source or "", {}).get(digest or "")
        if data is not None and registry.mounts:
            registry.add_blob(name, data)
            self._send(201, b"", {"Location": f"/v2/{name}/blobs/{digest}"}, fault)
            return
        session = uuid.uuid4().hex
        registry.uploads[session] = bytearray()
        self._send(202, b"", self._session(name, session), fault)

    def _patch(self, name: str, session: str, arrived: bytearray, fault: Fault) -> None:
        if not self.registry.chunks:
            self._error(405, "UNSUPPORTED", "the operation is unsupported")
            return
        found = re.fullmatch(r"(\d+)-(\d+)", self.headers.get("Content-Range", ""))
        if found is not None and int(found[1]) != len(arrived):
            self._error(416, "BLOB_UPLOAD_INVALID", "out of order", self._session(name, session))
            return
        self._receive(arrived, fault)
        self._send(202, b"", self._session(name, session), fault)

    def _end_upload(self, name: str, session: str, arrived: bytearray, fault: Fault) -> None:
        digest = Digest.of(bytes(arrived))
        if str(digest) != self._query("digest"):
            del self.registry.uploads[session]
            self._error(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
            return
        self.registry.add_blob(name, bytes(arrived))
        self.registry.uploads.pop(session, None)
        self._send(201, b"", {"Location": f"/v2/{name}/blobs/{digest}", "Docker-Content-Digest": str(digest)}, fault)

    def _session(self, name: str, session: str) -> dict[str, str]:
        arrived = len(self.registry.uploads.get(session, b""))
        location = f"/v2/{name}/blobs/uploads/{session}?_state=hush-{arrived}"
        headers = {"Location": (self._origin() if self.registry.absolute else "") + location}
        headers["Range"] = f"0-{max(0, arrived - 1)}"
        if self.registry.chunk_least is not None:
            headers["OCI-Chunk-Min-Length"] = str(self.registry.chunk_least)
        return headers

    def _receive(self, arrived: bytearray, fault: Fault) -> None:
        if fault.take is not None:
            arrived += self._take_body(min(fault.take, self._left))
            self._break(reset=True)
        while self._left:
            if fault.slow:
                time.sleep(fault.slow)
            arrived += self._take_body(min(_PIECE, self._left))

    def _take_body(self, size: int) -> bytes:
        data = self.rfile.read(size) if size else b""
        self._left -= len(data)
        if len(data) < size:
            raise ConnectionResetError
        return data

    def _error(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"errors": [{"code": code, "message": message, "detail": None}]}).encode()
        self._send(status, body, {"Content-Type": "application/json", **(headers or {})})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away: tests break connections, and do not trust certificates."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError, ssl.SSLError)):
            super().handle_error(request, client_address)


class _TlsServer(_Server):
    tls: ssl.SSLContext

    def finish_request(self, request: Any, client_address: Any) -> None:
        # In the connection's own thread: a client that does not shake hands must not stop the others.
        request.settimeout(10)
        with self.tls.wrap_socket(request, server_side=True) as secure:
            super().finish_request(secure, client_address)


@contextmanager
def start(handler: type[_Handler], registry: FakeRegistry, tls: ssl.SSLContext | None) -> Iterator[str]:
    """Serve with a handler until the block ends; give ``host:port``."""
    bound = type(handler.__name__, (handler,), {"registry": registry})
    if tls is None:
        server = _Server(("127.0.0.1", 0), bound)
    else:
        server = type("_Bound", (_TlsServer,), {"tls": tls})(("127.0.0.1", 0), bound)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
