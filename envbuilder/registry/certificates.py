"""Certificates for single registries, as containers-certs.d(5) and Docker keep them.

A folder ``certs.d/<host[:port]>`` holds authorities (``*.crt``), trusted in addition to the machine's, and certificates
for the client (``x.cert`` with ``x.key``). Looked for in the user's and the system's ``containers``, then in Docker's.
"""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from urllib3.util.ssl_ import create_urllib3_context

from envbuilder.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


_HANDSHAKE_SECONDS = 10.0


class CertificateError(InputError):
    """A file with a certificate or key cannot be used."""


def tls_for(host: str, *, client: bool) -> ssl.SSLContext | None:
    """Return what to connect to a registry with; None when nothing is said of it. ``client``: with its certificates.

    Raises:
        CertificateError: a file is missing beside another, or holds nothing that can be used.

    """
    context: ssl.SSLContext | None = None
    for folder in _folders(host):
        for file in sorted(folder.iterdir()):
            if file.suffix == ".crt" or (file.suffix == ".cert" and client):
                context = context or create_urllib3_context()
                _load(context, file)
    return context


def shakes_hands(host: str) -> bool:
    """Return whether a host of this machine speaks TLS. Asks for no certificate: reading all authorities takes long."""
    parts = urlsplit(f"//{host}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((parts.hostname or "", parts.port or 443), _HANDSHAKE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname),
        ):
            return True
    except OSError:
        return False


def _folders(host: str) -> Iterator[Path]:
    home, config = Path.home(), os.environ.get("XDG_CONFIG_HOME")
    containers = (Path(config) if config else home / ".config") / "containers"
    docker = Path(os.environ.get("DOCKER_CONFIG") or home / ".docker")
    for parent in (containers, Path("/etc/containers"), docker, Path("/etc/docker")):
        if (folder := parent / "certs.d" / host).is_dir():
            yield folder


def _load(context: ssl.SSLContext, file: Path) -> None:
    key = file.with_suffix(".key")
    try:
        if file.suffix == ".crt":
            context.load_verify_locations(cafile=file)
        elif key.exists():
            context.load_cert_chain(file, key)
        else:
            raise CertificateError(f"{file}: its key {key.name} is not beside it")
    except (OSError, ssl.SSLError) as error:
        what = "authority's certificate" if file.suffix == ".crt" else "certificate with its key"
        raise CertificateError(f"{file}: holds no {what} that can be used: {error.strerror or error}") from error
