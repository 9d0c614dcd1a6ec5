"""One registry host, spoken to for one repository: scheme, authorization, redirects, errors. Safe to share.

The ``Authorization`` header goes to the registry's own scheme, host and port and nowhere else, so not to the object
store that a blob is redirected to; and never over plain HTTP to another machine, unless that is declared insecure.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urljoin, urlsplit, urlunsplit

import urllib3
from requests.auth import AuthBase

from envbuilder import http, report
from envbuilder.registry.auth import Authority, Grant, TokenRequest
from envbuilder.registry.certificates import shakes_hands, tls_for
from envbuilder.registry.errors import RegistryUnreachableError, WrongAnswerError, from_answer, unreachable
from envbuilder.registry.hosts import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import requests

    from envbuilder.registry.credentials import Credentials
    from envbuilder.registry.hosts import Place

#: Answers that are no blobs are read up to this many bytes: manifests may have 4 MiB, lists of tags more.
MOST_BODY = 16 << 20
_MOST_ERROR = 1 << 16
_MOST_HOPS = 6
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
#: Methods that can be repeated without harm; POST begins an upload, and one too many of these expires.
_REPEATABLE = frozenset({"GET", "HEAD", "PUT", "POST"})


@dataclass(frozen=True)
class Patience:
    """How long and how often to try: repetitions, seconds before them (doubled, with jitter), seconds of silence."""

    retries: int = 4
    backoff: float = 0.5
    read_seconds: float | None = None
    #: How long a trickle of bytes is put up with (``reading.LEAST``).
    slow_seconds: float = 60.0
    #: A registry that copies a large blob into its storage is silent for long.
    commit_seconds: float = 600.0
    connections: int = 16
    #: Blobs up to this size are uploaded in one piece, larger ones in chunks of the other.
    monolithic: int = 16 << 20
    chunk: int = 64 << 20


@dataclass(frozen=True)
class Ask:
    """A request. ``path`` is below the repository (``manifests/v1``), or from the host's root, or a URL it gave.

    ``what`` says in an error what was to be done; ``fine`` are the statuses that are no error; ``push`` asks for the
    right to write, ``mounts`` for that to read another repository. ``once`` is for what must not be repeated blindly.
    ``body`` is called for each time that it is sent.
    """

    method: str
    path: str
    what: str
    fine: frozenset[int] = frozenset({200})
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Callable[[], bytes | Iterable[bytes]] | None = None
    push: bool = False
    mounts: str | None = None
    once: bool = False
    leave: bool = False  # return a redirect to another host instead of following it
    read_seconds: float | None = None


class Endpoint:
    """The repository ``place.repository`` on ``place.host``."""

    def __init__(
        self, place: Place, find: Callable[[], Credentials | None], patience: Patience, *, push: bool = False
    ) -> None:
        self.place = place
        self.patience = patience
        #: Set by whoever reads from several when this one turned out to be of no use.
        self.failed = False
        #: False once the registry has answered a request for a range with the whole.
        self.ranges = True
        self._push = push
        self._lock = threading.Lock()
        self._base: str | None = None
        self._authority = Authority(place.host, find, self._ask_token)
        self._own = self._session(own=True, retries=patience.retries)
        self._once = self._session(own=True, retries=0)
        self._foreign = self._session(own=False, retries=patience.retries)

    @contextmanager
    def ask(self, ask: Ask) -> Iterator[requests.Response]:
        """Send a request; inside the block the answer's body can be read with ``http.chunks`` or ``body``.

        Raises:
            RegistryError: of the kind that the failure is, unless the status is among ``ask.fine``.

        """
        try:
            response = self._follow(ask)
        except http.OutOfReachError as broken:
            raise unreachable(ask.what, self.place.host, broken) from broken
        with response:
            report.detail(f"{ask.method} {http.redact(response.url)}: {response.status_code}")
            if response.status_code not in ask.fine:
                text = self._error_body(response)
                error = from_answer(ask.what, self.place.host, response.status_code, text, self._authority.secrets)
                error.wait = http.retry_after(response)
                raise error
            yield response
            _drain(response)

    def absolute(self, location: str | None, response: requests.Response, what: str) -> str:
        """Return the URL that a ``Location`` or ``Link`` header gives.

        Raises:
            WrongAnswerError: there is none, or it would have us speak plainly where we speak securely.

        """
        if not location:
            raise WrongAnswerError(f"{what}: the registry does not say where to go on", status=response.status_code)
        try:
            parts = urlsplit(urljoin(response.url, location))
            before = urlsplit(response.url)
            port = parts.port
        except ValueError:
            raise WrongAnswerError(f"{what}: the registry sends us to a malformed URL") from None
        same = parts.netloc == before.netloc or (parts.hostname == before.hostname and port is None)
        if parts.scheme == "http" and before.scheme == "https" and same:
            # A registry behind a proxy that ends TLS does not know how it is spoken to.
            parts = parts._replace(scheme="https", netloc=before.netloc)
        url = urlunsplit(parts)
        plain_before = before.scheme == "http"
        plain_will_do = parts.scheme == "http" and (plain_before or self._plain_will_do(parts.netloc))
        if parts.scheme != "https" and not plain_will_do:
            raise WrongAnswerError(f"{what}: the registry sends us to {http.redact(url)}, which is not secure")
        return url

    def body(self, response: requests.Response, what: str, most: int = MOST_BODY) -> bytes:
        """Return a whole answer of at most ``most`` bytes."""
        data = bytearray()
        try:
            for piece in http.chunks(response, decode=True):
                data += piece
                if len(data) > most:
                    raise WrongAnswerError(f"{what}: the answer is larger than {most} bytes")
        except http.BrokenOffError as error:
            raise unreachable(what, self.place.host, error) from error
        return bytes(data)

    def read(self, ask: Ask) -> tuple[requests.Response, bytes]:
        """Return a whole answer, asked for again when its body breaks off."""
        for attempt in range(self.patience.retries + 1):
            try:
                with self.ask(ask) as response:
                    return response, self.body(response, ask.what)
            except RegistryUnreachableError as error:
                if attempt == self.patience.retries or not isinstance(error.__cause__, http.BrokenOffError):
                    raise
        raise AssertionError  # pragma: no cover (the last attempt raises)

    def _follow(self, ask: Ask) -> requests.Response:
        url = ask.path if "://" in ask.path else f"{self._base_url()}{self._below(ask.path)}"
        for _ in range(_MOST_HOPS):
            response = self._authorized(ask, url)
            if response.status_code not in _REDIRECTS or "Location" not in response.headers:
                return response
            try:
                target = self.absolute(response.headers["Location"], response, ask.what)
            except WrongAnswerError:
                response.close()
                raise
            if ask.leave and not self._is_own(target):
                return response
            _drain(response)
            response.close()
            if ask.method not in {"GET", "HEAD"} and response.status_code not in {307, 308}:
                raise WrongAnswerError(f"{ask.what}: the registry redirects what is to be written")
            url = target
        raise WrongAnswerError(f"{ask.what}: the registry redirects in circles")

    def _below(self, path: str) -> str:
        return path if path.startswith("/") else f"/v2/{self.place.repository}/{path}"

    def _authorized(self, ask: Ask, url: str) -> requests.Response:
        if not self._is_own(url):
            return self._send(self._foreign, ask, url, None)
        session = self._once if ask.once else self._own
        grants = self._grants(ask)
        header = self._authority.header(grants)
        response = self._send(session, ask, url, header)
        if response.status_code != 401 or "WWW-Authenticate" not in response.headers:
            return response
        try:
            renewed = self._authority.renew(response.headers["WWW-Authenticate"], grants, header)
        except BaseException:
            response.close()
            raise
        if renewed is None:
            return response
        _drain(response)
        response.close()
        return self._send(session, ask, url, renewed)

    def _send(self, session: requests.Session, ask: Ask, url: str, header: str | None) -> requests.Response:
        return http.send(
            session, ask.method, url, headers={"Accept-Encoding": "identity", **ask.headers},
            body=ask.body() if ask.body is not None else None, auth=_Authorization(header), redirects=False,
            read_seconds=ask.read_seconds or self.patience.read_seconds,
        )  # fmt: skip

    def _grants(self, ask: Ask) -> frozenset[Grant]:
        actions = ("pull", "push") if ask.push or self._push else ("pull",)
        grants: set[Grant] = {("repository", self.place.repository, action) for action in actions}
        if ask.mounts is not None:
            grants.add(("repository", ask.mounts, "pull"))
        return frozenset(grants)

    def _ask_token(self, request: TokenRequest, secrets: tuple[str, ...]) -> bytes:
        """Ask a token server, which may be another host: the registry says so on a connection that we trust."""
        what = f"{self.place.host}: getting a token from {http.redact(request.realm)}"
        parts = urlsplit(request.realm)
        if parts.scheme != "https" and not (parts.scheme == "http" and self._plain_will_do(parts.netloc)):
            raise WrongAnswerError(f"{what}: would send credentials over a connection that is not secure")
        fields = urlencode(request.parameters)
        url, body, headers = request.realm, None, {}
        if request.method == "GET":
            url += ("&" if parts.query else "?") + fields if fields else ""
        else:
            body, headers = fields.encode(), {"Content-Type": "application/x-www-form-urlencoded"}
        auth = _Authorization(f"Basic {request.basic}" if request.basic else None)
        session = self._own if parts.hostname == urlsplit(f"//{self.place.host}").hostname else self._foreign
        with http.send(
            session, request.method, url, headers=headers, body=body, auth=auth, redirects=False
        ) as response:
            report.detail(f"{request.method} {http.redact(request.realm)}: {response.status_code}")
            if response.status_code != 200:
                text = self._error_body(response)
                raise from_answer(what, self.place.host, response.status_code, text, secrets)
            return self.body(response, what, _MOST_ERROR)

    def _base_url(self) -> str:
        with self._lock:
            if self._base is None:
                secure = f"https://{self.place.host}"
                plain = self._plain_will_do(self.place.host) and not self._speaks_tls()
                self._base = f"http://{self.place.host}" if plain else secure
            return self._base

    def _speaks_tls(self) -> bool:
        """Return whether the host answers securely; a certificate that is not trusted is a yes, and an error later."""
        if self.place.loopback:
            return shakes_hands(self.place.host)
        try:  # by the way that requests will take, perhaps through a proxy
            url = f"https://{self.place.host}/v2/"
            with http.send(self._once, "GET", url, auth=_Authorization(None), redirects=False):
                return True
        except http.OutOfReachError as error:
            return "certificate" in error.reason

    def _plain_will_do(self, netloc: str) -> bool:
        return is_loopback(netloc) or (self.place.insecure and netloc == self.place.host)

    def _is_own(self, url: str) -> bool:
        parts, own = urlsplit(url), urlsplit(self._base_url())
        return (parts.scheme, _with_port(parts.scheme, parts.netloc)) == (
            own.scheme,
            _with_port(own.scheme, own.netloc),
        )

    def _session(self, *, own: bool, retries: int) -> requests.Session:
        patience = self.patience
        session = http.new_session(
            connections=patience.connections, retries=retries, backoff=patience.backoff, methods=_REPEATABLE,
            tls=tls_for(self.place.host, client=own),
        )  # fmt: skip
        if own and self.place.insecure:
            # The user was told by writing `insecure = true`; a warning for each request would tell nobody more.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
            session.verify = False
        return session

    def _error_body(self, response: requests.Response) -> bytes:
        try:
            return response.raw.read(_MOST_ERROR, decode_content=True) or b""
        except (urllib3.exceptions.HTTPError, OSError):
            return b""  # the status says enough


class _Authorization(AuthBase):
    """Sends this header and no other: without it, requests would take one from the machine's netrc."""

    def __init__(self, header: str | None) -> None:
        self._header = header

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._header is not None:
            request.headers["Authorization"] = self._header
        return request


def _with_port(scheme: str, netloc: str) -> str:
    host = netloc.rpartition("@")[2].lower()
    return host if host.rpartition(":")[2].isdecimal() else f"{host}:{443 if scheme == 'https' else 80}"


def _drain(response: requests.Response) -> None:
    """Read what is left of a short body, so that its connection can be used again."""
    try:
        response.raw.read(_MOST_ERROR, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError, ValueError):
        response.close()
