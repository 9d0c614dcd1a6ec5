"""What a registry asks for before it answers, and the ``Authorization`` header that satisfies it.

Challenges are read as RFC 9110, section 11, writes them. ``Bearer`` follows the token specification of Docker's
registry (https://distribution.github.io/distribution/spec/auth/token/ and ``oauth/``), ``Basic`` RFC 7617.
"""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from envbuilder.registry.errors import WrongAnswerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from envbuilder.registry.credentials import Credentials

#: What a token allows: the type of a resource (``repository``), its name, an action (``pull``).
Grant: TypeAlias = tuple[str, str, str]

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 (RFC 9110's `token`)
_PARAMETER = re.compile(rf'[\s,]*({_TOKEN})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|({_TOKEN}))')
_SCHEME = re.compile(rf"[\s,]*({_TOKEN})(?:\s+[A-Za-z0-9._~+/-]+=*(?=\s*(?:,|$)))?")
_CLIENT = "envbuilder"
_LIFETIME = 60.0
#: A token is not used in the last seconds of its life, in which it might expire on the way.
_MARGIN = 10.0


@dataclass(frozen=True)
class Challenge:
    """One way to authenticate that a server offers: the scheme and the parameters' names in lower case."""

    scheme: str
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class TokenRequest:
    """What to ask a token server: GET with ``parameters`` as query, or POST with them as form."""

    realm: str
    method: str
    parameters: tuple[tuple[str, str], ...] = field(repr=False)
    basic: str = field(default="", repr=False)


class TokenServer(Protocol):
    """Sends a token request and returns the answer's body; raises errors of the tree."""

    def __call__(self, request: TokenRequest, secrets: tuple[str, ...]) -> bytes:
        """Ask; ``secrets`` must not be shown."""


@dataclass(frozen=True)
class _Held:
    grants: frozenset[Grant]
    header: str = field(repr=False)
    until: float


def challenges(header: str) -> list[Challenge]:
    """Read ``WWW-Authenticate``, which may hold several challenges; what is malformed ends the list."""
    found: list[Challenge] = []
    parameters: dict[str, str] = {}
    position = 0
    while position < len(header):
        parameter = _PARAMETER.match(header, position) if found else None
        if parameter is not None:
            quoted, plain = parameter[2], parameter[3]
            parameters.setdefault(parameter[1].lower(), plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted))
            position = parameter.end()
            continue
        scheme = _SCHEME.match(header, position)
        if scheme is None:
            break
        parameters = {}
        found.append(Challenge(scheme[1].lower(), parameters))
        position = scheme.end()
    return found


def grants_of(scope: str) -> frozenset[Grant]:
    """Read a scope, ``repository:team/app:pull,push``, or several between spaces."""
    grants = set()
    for one in scope.split():
        kind, _, rest = one.partition(":")
        name, _, actions = rest.rpartition(":")
        grants |= {(kind, name, action) for action in actions.split(",")}
    return frozenset(grants)


def scopes_of(grants: frozenset[Grant]) -> list[str]:
    """Return the scopes that ask for the grants, sorted."""
    resources = sorted({grant[:2] for grant in grants})
    return [
        f"{kind}:{name}:" + ",".join(sorted(g[2] for g in grants if g[:2] == (kind, name))) for kind, name in resources
    ]


class Authority:
    """Finds the ``Authorization`` header for one registry; tokens are kept while they live. Safe to share."""

    def __init__(self, host: str, find: Callable[[], Credentials | None], ask: TokenServer) -> None:
        self._host = host
        self._find = find
        self._ask = ask
        self._lock = threading.Lock()
        self._challenge: Challenge | None = None
        self._known: tuple[Credentials | None] | None = None
        self._held: list[_Held] = []

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be shown of what is known so far."""
        known = self._known[0] if self._known is not None else None
        tokens = tuple(held.header.partition(" ")[2] for held in list(self._held))
        return (known.secrets if known is not None else ()) + tokens

    def header(self, grants: frozenset[Grant]) -> str | None:
        """Return what to send with a request; None before the registry has asked for anything."""
        with self._lock:
            if self._challenge is None:
                return None
            return self._basic() if self._challenge.scheme == "basic" else self._bearer(grants)

    def renew(self, challenge: str, grants: frozenset[Grant], used: str | None) -> str | None:
        """Return what to send instead of ``used``, which was answered with ``challenge``; None when there is nothing.

        Raises:
            AccessRefusedError: the token server refuses the credentials.
            WrongAnswerError: the challenge is none that could be met.

        """
        with self._lock:
            self._challenge = self._choose(challenge)
            if self._challenge.scheme == "basic":
                header = self._basic()
                return header if header != used else None
            # A registry that was asked with too little says what it wants.
            self._held = [held for held in self._held if held.header != used]
            bearer = self._bearer(grants | grants_of(self._challenge.parameters.get("scope", "")))
            return bearer if bearer != used else None

    def _choose(self, header: str) -> Challenge:
        offered = challenges(header)
        for scheme in ("bearer", "basic"):
            for challenge in offered:
                if challenge.scheme == scheme and (scheme == "basic" or challenge.parameters.get("realm")):
                    return challenge
        names = ", ".join(f"`{challenge.scheme}`" for challenge in offered) or "nothing"
        raise WrongAnswerError(
            f"{self._host}: asks for authentication, but offers {names} where `bearer` or `basic` is known"
        )

    def _credentials(self) -> Credentials | None:
        if self._known is None:
            self._known = (self._find(),)
        return self._known[0]

    def _basic(self) -> str | None:
        credentials = self._credentials()
        return f"Basic {credentials.basic}" if credentials is not None and credentials.basic else None

    def _bearer(self, grants: frozenset[Grant]) -> str:
        """Return a token for the grants: one that is held, or a new one."""
        credentials = self._credentials()
        if credentials is not None and credentials.registry_token:
            return f"Bearer {credentials.registry_token}"
        now = time.monotonic()
        self._held = [held for held in self._held if held.until > now]
        for held in self._held:
            if grants <= held.grants:
                return held.header
        parameters = self._challenge.parameters if self._challenge is not None else {}
        request = _token_request(parameters, grants, credentials)
        token, lifetime = self._read(self._ask(request, credentials.secrets if credentials is not None else ()))
        self._held.append(_Held(grants, f"Bearer {token}", now + max(lifetime - _MARGIN, lifetime / 2)))
        return f"Bearer {token}"

    def _read(self, body: bytes) -> tuple[str, float]:
        try:
            answer = json.loads(body)
            token = answer.get("token") or answer.get("access_token")
            lifetime = float(answer.get("expires_in") or _LIFETIME)
        except (ValueError, TypeError, AttributeError, RecursionError):
            token, lifetime = None, _LIFETIME
        # Else it would end the header, or not get into it.
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise WrongAnswerError(f"{self._host}: its token server answers without a token")
        return token, lifetime


def _token_request(
    parameters: Mapping[str, str], grants: frozenset[Grant], credentials: Credentials | None
) -> TokenRequest:
    """Return what to ask: GET as user or nobody, POST with an identity token ("refresh token" in OAuth 2)."""
    realm, service, scopes = parameters["realm"], parameters.get("service", ""), scopes_of(grants)
    if credentials is not None and credentials.identity_token:
        form = {
            "grant_type": "refresh_token", "client_id": _CLIENT, "service": service, "scope": " ".join(scopes),
            "refresh_token": credentials.identity_token,
        }  # fmt: skip
        return TokenRequest(realm, "POST", tuple(form.items()))
    query = [("service", service)] if service else []
    query += [("scope", scope) for scope in scopes]
    basic = credentials.basic if credentials is not None else ""
    if basic:
        query.insert(0, ("client_id", _CLIENT))
    return TokenRequest(realm, "GET", tuple(query), basic)
