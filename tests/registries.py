"""Registries for tests: one in this process that can be told to fail in every way, and Debian's docker-registry.

``with fake_registry() as registry:`` serves an empty ``FakeRegistry`` at ``registry.address`` (127.0.0.1, plain HTTP, which
our client takes from this machine). Change its attributes and add faults while it runs; look at ``registry.requests``
afterwards. ``quick_retries`` makes the client's waits between repetitions short.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from envbuilder.registry import client
from envbuilder.run import run
from tests import engines
from tests.registry.fake import FakeRegistry, Fault, Request, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

__all__ = [
    "Authority", "DebianRegistry", "FakeRegistry", "Fault", "Request", "debian_registry", "fake_registry",
    "make_authority", "private_configuration", "quick_retries",
]  # fmt: skip

#: What ``debian_registry(..., password=True)`` asks for.
CREDENTIALS = ("user", "secret")
#: The same as a line of htpasswd: made once, so that the tests need no program for it.
_HTPASSWD = "user:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"
_START_SECONDS = 30.0
_STOP_SECONDS = 10.0


@contextmanager
def fake_registry(**attributes: Any) -> Iterator[FakeRegistry]:
    """Serve a registry that is empty until the block ends; ``attributes`` are those of ``FakeRegistry``."""
    with serve(FakeRegistry(**attributes)) as registry:
        yield registry


def quick_retries(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the client wait but milliseconds before it tries again; ``changes`` are further fields of ``Patience``."""
    monkeypatch.setattr(client, "PATIENCE", replace(client.PATIENCE, **{"backoff": 0.001, **changes}))


def private_configuration(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Hide this machine's configuration of registries from the test; return the folder that has its own.

    ``config.json`` is Docker's; ``containers/registries.conf``, ``containers/auth.json`` and
    ``containers/certs.d/<host>/`` are as Podman has them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for variable in ("REGISTRY_AUTH_FILE", "CONTAINERS_REGISTRIES_CONF", "XDG_RUNTIME_DIR", "NETRC"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("HOME", "DOCKER_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(folder))
    return folder


@dataclass(frozen=True)
class Authority:
    """A certificate authority of our own, and a certificate of it for 127.0.0.1 and localhost; one for a client too."""

    certificate: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]

    def context(self, *, ask_client: bool = False) -> ssl.SSLContext:
        """Return what a server in this process needs; ``ask_client``: it wants a certificate of the client."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.server)
        if ask_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.certificate)
        return context

    def trust(self, configuration: Path, host: str, *, client: bool = False) -> None:
        """Put it where the client looks for a host's authorities (``private_configuration``)."""
        folder = configuration / "containers" / "certs.d" / host
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.certificate, folder / "ca.crt")
        if client:
            shutil.copy2(self.client[0], folder / "client.cert")
            shutil.copy2(self.client[1], folder / "client.key")


def make_authority(folder: Path) -> Authority:
    """Make an authority with openssl, and certificates that are good for a day."""
    folder.mkdir(parents=True, exist_ok=True)
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    root = (folder / "ca.pem", folder / "ca.key")
    run(["openssl", "req", "-x509", *curve, "-keyout", root[1], "-out", root[0], "-subj", "/CN=tests"])

    def certificate(name: str, *extensions: str) -> tuple[Path, Path]:
        made = (folder / f"{name}.pem", folder / f"{name}.key")
        more = [word for extension in extensions for word in ("-addext", extension)]
        run(["openssl", "req", "-x509", "-CA", root[0], "-CAkey", root[1], *curve, "-keyout", made[1], "-out", made[0],
             "-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:FALSE", *more])  # fmt: skip
        return made

    server = certificate("server", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    return Authority(root[0], server, certificate("client", "extendedKeyUsage=clientAuth"))


@dataclass(frozen=True)
class DebianRegistry:
    """A running docker-registry that keeps everything in ``folder``."""

    address: str
    folder: Path
    process: subprocess.Popen[bytes]

    def stored_bytes(self) -> int:
        """Return the bytes of the blobs that it keeps."""
        return sum(path.stat().st_size for path in (self.folder / "data").rglob("data") if path.is_file())


@contextmanager
def debian_registry(
    folder: Path, *, password: bool = False, authority: Authority | None = None, port: int = 0
) -> Iterator[DebianRegistry]:
    """Run Debian's docker-registry with an empty storage (or the one that is in ``folder``) until the block ends.

    Skips the test, or fails it in CI, when the program is not installed. Mark such tests ``docker`` or ``slow``.
    """
    engines.need("docker-registry")
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{port or _free_port()}"
    config = folder / "config.yml"
    config.write_text(_configuration(folder, address, password=password, authority=authority))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(config)], stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait(address, process, folder / "log")
        yield DebianRegistry(address, folder, process)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _configuration(folder: Path, address: str, *, password: bool, authority: Authority | None) -> str:
    lines = [
        "version: 0.1", "log: {level: error, accesslog: {disabled: true}}",
        f"storage: {{filesystem: {{rootdirectory: '{folder}/data'}}, delete: {{enabled: true}}}}",
        "http:", f"  addr: '{address}'",
    ]  # fmt: skip
    if authority is not None:
        lines.append(f"  tls: {{certificate: '{authority.server[0]}', key: '{authority.server[1]}'}}")
    if password:
        (folder / "htpasswd").write_text(_HTPASSWD)
        lines.append(f"auth: {{htpasswd: {{realm: tests, path: '{folder}/htpasswd'}}}}")
    return "\n".join(lines) + "\n"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    host, _, port = address.partition(":")
    end = time.monotonic() + _START_SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        if process.poll() is not None or time.monotonic() > end:
            engines.unavailable(f"docker-registry did not start:\n{log.read_text(errors='replace')[-2000:]}")
        threading.Event().wait(0.05)
