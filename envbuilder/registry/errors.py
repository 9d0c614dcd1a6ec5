"""What can go wrong with a registry. Each error carries the registry's own code and message, with secrets left out."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from envbuilder import http
from envbuilder.errors import EnvbuilderError, InputError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterable

_URL = re.compile(r"https?://[^\s\"'<>]+")
_MOST_TEXT = 300
_MOST_ERRORS = 3


class RegistryError(EnvbuilderError):
    """Base: ``status`` is the HTTP status (None: no answer), ``code`` the registry's (``MANIFEST_UNKNOWN``), if any."""

    def __init__(
        self, message: str, *, status: int | None = None, code: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        #: Seconds that the registry asks to wait.
        self.wait: float | None = None


class RegistryUnreachableError(RegistryError, UnreachableError):
    """The registry does not answer, or answers that it cannot now. Exit code 3."""

    @property
    def temporary(self) -> bool:
        """Whether asking again later may well work."""
        return self.status is None or self.status in http.TEMPORARY


class AccessRefusedError(RegistryError, UnreachableError):
    """The registry wants credentials, or other ones. Exit code 3."""


class NotInRegistryError(RegistryError, InputError):
    """The registry has no such repository, manifest or blob. Exit code 2."""


class RejectedError(RegistryError):
    """The registry understood the request and will not do it: an invalid manifest, a quota. Exit code 1."""


class WrongAnswerError(RegistryError):
    """An answer is not what the specification says: other bytes than the digest, no location. Exit code 1."""


def unreachable(what: str, host: str, error: http.OutOfReachError) -> RegistryUnreachableError:
    """Say that no answer came, or that it broke off. ``what`` was to be done."""
    hint = error.hint
    if "certificate" in error.reason:
        hint = f"put the certificate of its authority into ~/.config/containers/certs.d/{host}/ca.crt"
    return RegistryUnreachableError(f"{what}: {error.message}", hint=hint)


def from_answer(what: str, host: str, status: int, body: bytes, secrets: Iterable[str] = ()) -> RegistryError:
    """Return the error that an answer means. ``body`` is read as the specification's section "Error codes" says."""
    codes, text = _registry_says(body, secrets)
    said = f": {text}" if text else ""
    code = codes[0] if codes else None
    if status in {401, 403, 407}:
        return AccessRefusedError(
            f"{what}: the registry refuses access (status {status}){said}", status=status, code=code, hint=login(host)
        )
    if status in {404, 410}:
        hint = "check the name; some registries also answer so where credentials are missing: " + login(host)
        return NotInRegistryError(
            f"{what}: the registry has none (status {status}){said}", status=status, code=code, hint=hint
        )
    if status >= 500 or status in http.TEMPORARY:
        message = f"{what}: the registry answers with status {status}{said}"
        hint = "it may be overloaded or broken; wait, then run again"
        return RegistryUnreachableError(message, status=status, code=code, hint=hint)
    return RejectedError(f"{what}: the registry rejects it (status {status}){said}", status=status, code=code)


def login(host: str) -> str:
    """Return the hint for missing credentials."""
    where = "" if host == "registry-1.docker.io" else f" {host}"
    return f"run `docker login{where}` with an account that may do this"


def clean(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a server's text fit to be shown: one line, short, no queries of URLs, none of ``secrets``."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "****")
    text = _URL.sub(lambda found: http.redact(found[0]), text)
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _registry_says(body: bytes, secrets: Iterable[str]) -> tuple[list[str], str]:
    """Return the codes, and codes with messages as one text; both empty when the body is not of the specification."""
    try:
        errors = json.loads(body)["errors"]
        pairs = [(str(error["code"]), str(error.get("message") or "")) for error in errors[:_MOST_ERRORS]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return [], ""
    secrets = list(secrets)
    texts = [f"{clean(code)}: {clean(message, secrets)}" if message else clean(code) for code, message in pairs]
    return [clean(code) for code, _ in pairs], "; ".join(texts)
