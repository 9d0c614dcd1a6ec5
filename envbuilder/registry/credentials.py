"""Credentials as Docker and Podman keep them: in their files, or with a credential helper.

Files, the first that has an entry wins: ``REGISTRY_AUTH_FILE``; Docker's ``config.json`` in ``DOCKER_CONFIG`` or
``~/.docker``; Podman's ``containers/auth.json`` in ``XDG_RUNTIME_DIR`` and in the configuration folder. The form is that of
containers-auth.json(5): ``credHelpers``, ``credsStore``, and ``auths`` whose keys may go down to a repository.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuilder.errors import HostError, InputError
from envbuilder.registry.errors import clean
from envbuilder.run import ProgramFailedError, ProgramMissingError, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from envbuilder.registry.reference import Reference

#: Under this name Docker keeps the credentials of Docker Hub.
_DOCKER_HUB_SERVER = "https://index.docker.io/v1/"
_DOCKER_HUB_KEYS = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_IDENTITY_TOKEN_USER = "<token>"  # noqa: S105 (a marker of the helpers' protocol)
_NOT_FOUND = ("credentials not found", "no credentials server url", "no credentials username")


class CredentialsFileError(InputError):
    """A file with credentials is not what it should be. Shows the place, never the content."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}", hint="`docker login` writes it anew")
        self.file = file


class HelperError(HostError):
    """A credential helper is missing, or failed."""


@dataclass(frozen=True)
class Credentials:
    """User and password, or a token: to renew others with, or to be sent as it is. ``source`` says where from."""

    source: str
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The user and password as the ``Basic`` scheme sends them (RFC 7617); empty without."""
        if not self.user and not self.password:
            return ""
        return base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be shown."""
        all_of_them = (self.password, self.identity_token, self.registry_token, self.basic)
        return tuple(secret for secret in all_of_them if secret)


def find_credentials(reference: Reference) -> Credentials | None:
    """Return the credentials for a repository; None when nobody keeps any. Runs credential helpers.

    Raises:
        CredentialsFileError: a file is not valid.
        HelperError: a helper that a file names is missing or fails.

    """
    for file in _files():
        document = _load(file)
        if document is not None and (found := _look_up(file, document, reference)) is not None:
            return found
    return None


def _files() -> Iterator[Path]:
    if explicit := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(explicit)
    yield Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers" / "auth.json"
    yield Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "containers" / "auth.json"


def _load(file: Path) -> Mapping[str, Any] | None:
    try:
        document = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CredentialsFileError(file, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CredentialsFileError(file, f"is not valid JSON{line}") from None
    if not isinstance(document, dict):
        raise CredentialsFileError(file, "is not a JSON object")
    return document


def _look_up(file: Path, document: Mapping[str, Any], reference: Reference) -> Credentials | None:
    hub = reference.registry in _DOCKER_HUB_KEYS
    helpers = _table(file, document, "credHelpers")
    keys = (_DOCKER_HUB_SERVER, *sorted(_DOCKER_HUB_KEYS)) if hub else (reference.registry,)
    helper = next((helpers[key] for key in keys if key in helpers), document.get("credsStore"))
    if helper:
        found = _ask_helper(file, str(helper), _DOCKER_HUB_SERVER if hub else reference.registry)
        if found is not None:
            return found
    auths = {_normalized(key): (key, value) for key, value in _table(file, document, "auths").items()}
    for scope in _scopes(reference):
        if scope in auths:
            key, entry = auths[scope]
            if (found := _from_entry(file, key, entry)) is not None:
                return found
    return None


def _scopes(reference: Reference) -> Iterator[str]:
    """Yield the keys that a repository's credentials may stand under, the narrowest first."""
    registry = "docker.io" if reference.registry in _DOCKER_HUB_KEYS else reference.registry
    parts = reference.repository.split("/")
    for number in range(len(parts), -1, -1):
        yield "/".join([registry, *parts[:number]])


def _normalized(key: str) -> str:
    """Return a key of ``auths`` as ``host[/path]``: old Docker wrote URLs, whose path means nothing."""
    scheme, mark, rest = key.partition("://")
    if not mark:
        rest = scheme.rstrip("/")
        for version in ("/v1", "/v2"):
            rest = rest.removesuffix(version)
    host, slash, path = rest.partition("/")
    host = "docker.io" if host in _DOCKER_HUB_KEYS else host
    return host if mark else f"{host}{slash}{path}"


def _from_entry(file: Path, key: str, entry: Any) -> Credentials | None:
    """Read an entry of ``auths``; None when it is empty, as Docker writes them beside a ``credsStore``."""
    if not isinstance(entry, dict):
        raise CredentialsFileError(file, f"auths.{key} is not a JSON object")
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if encoded := entry.get("auth"):
        try:
            user, colon, password = base64.b64decode(str(encoded), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise CredentialsFileError(file, f"auths.{key}.auth is not valid base64") from None
        if not colon:
            raise CredentialsFileError(file, f"auths.{key}.auth is not a user and a password")
    identity, registry = str(entry.get("identitytoken") or ""), str(entry.get("registrytoken") or "")
    if not (user or password or identity or registry):
        return None
    # Docker pads the password with NUL bytes on some systems.
    return Credentials(str(file), user, password.strip("\0"), identity, registry)


def _ask_helper(file: Path, name: str, server: str) -> Credentials | None:
    """Run ``docker-credential-<name> get``, by the protocol of github.com/docker/docker-credential-helpers."""
    program = f"docker-credential-{name}"
    if "/" in name:
        raise CredentialsFileError(file, f"the credential helper `{clean(name)}` is not a name")
    hint = f"install it, or take it out of {file}"
    try:
        answer = json.loads(run([program, "get"], stdin=server).stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except ProgramMissingError as error:
        raise HelperError(
            f"{file} names the credential helper `{program}`, which is not installed", hint=hint
        ) from error
    except ProgramFailedError as error:
        says = clean(error.stdout or error.stderr)
        if says.lower().startswith(_NOT_FOUND):
            return None
        raise HelperError(f"`{program}` failed for {server}: {says}", hint=f"{file} names it; run it by hand") from None
    except (ValueError, KeyError, TypeError):
        raise HelperError(f"`{program}` did not answer with credentials for {server}", hint=hint) from None
    if user == _IDENTITY_TOKEN_USER:
        return Credentials(f"`{program}`", identity_token=secret)
    return Credentials(f"`{program}`", user, secret)


def _table(file: Path, document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = document.get(key) or {}
    if not isinstance(table, dict):
        raise CredentialsFileError(file, f"{key} is not a JSON object")
    return table
