"""HTTP as every room uses it: one kind of session, retries of what is temporary, failures said in our own errors.

The machine's own configuration is honoured as pip and uv honour it: proxies, netrc, certificate authorities
(``REQUESTS_CA_BUNDLE``, ``PIP_CERT``, ``SSL_CERT_FILE``), timeouts (``UV_HTTP_TIMEOUT``, ``PIP_DEFAULT_TIMEOUT``).
``file://`` URLs answer as a plain web server of that folder would, with listings and ranges.
"""

from __future__ import annotations

import errno
import html
import io
import os
import re
import ssl
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit, urlunsplit
from urllib.request import url2pathname

import requests
import urllib3
from requests.adapters import BaseAdapter, HTTPAdapter
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    IncompleteRead,
    InvalidHeader,
    NameResolutionError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.util.retry import Retry

from envbuilder import __version__, parallel
from envbuilder.errors import InputError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from urllib3.connectionpool import ConnectionPool

#: Bodies are read in pieces of at most this many bytes: what is lost when a connection breaks.
CHUNK = 1 << 16
#: Statuses after which the same request may well succeed a little later.
TEMPORARY = frozenset({408, 429, 500, 502, 503, 504})
_READ_ONLY = frozenset({"GET", "HEAD"})
_CONNECT_SECONDS = 15.0
_READ_SECONDS = 60.0
_MOST_RETRY_AFTER = 60.0
_BODY_ATTEMPTS = 3


class OutOfReachError(UnreachableError):
    """A server did not answer, or answered that it cannot. ``url`` is redacted."""

    def __init__(self, url: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{redact(url)}: {reason}", hint=hint or _hint(reason))
        self.url = redact(url)
        self.reason = reason


class BrokenOffError(OutOfReachError):
    """The connection broke while a body was being read; asking again, from there on, may well work."""


class RefusedError(OutOfReachError):
    """The server wants credentials, or other ones (401, 403, 407)."""

    def __init__(self, url: str, status: int) -> None:
        hint = "give credentials in the URL or in the file ~/.netrc, and check that they are allowed to read this"
        super().__init__(url, f"the server refuses access (status {status})", hint=hint)


class NotFoundError(InputError):
    """The server has no such page or file (404, 410). ``url`` is redacted."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{redact(url)}: there is no such page or file")
        self.url = redact(url)


@dataclass(frozen=True)
class Page:
    """A whole body: the URL it came from after redirects, its media type in lower case, its decoded bytes."""

    url: str
    media_type: str
    body: bytes


def redact(url: str) -> str:
    """Return the URL fit to be shown: user and password as ``****``, no query (it may be signed), no fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(a malformed URL)"
    user, at, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, f"****@{host}" if at and user else host, parts.path, "", ""))


def new_session(
    *,
    connections: int = 16,
    retries: int = 4,
    backoff: float = 0.5,
    methods: Collection[str] = _READ_ONLY,
    tls: ssl.SSLContext | None = None,
) -> requests.Session:
    """Return a session that threads may share, for ``connections`` at once to one host.

    A request by one of ``methods`` is repeated up to ``retries`` times when the connection fails or the status says to
    come back later, after ``backoff`` seconds doubled each time with jitter, or after what Retry-After says, up to a
    minute. ``tls`` may bring a client's certificate, and authorities in addition to the machine's; it must be this
    session's own.
    """
    session = requests.Session()
    session.headers["User-Agent"] = f"envbuilder/{__version__}"
    retry = _Retry(
        total=retries, backoff_factor=backoff, backoff_jitter=backoff, backoff_max=20, status_forcelist=TEMPORARY,
        allowed_methods=set(methods), raise_on_status=False, respect_retry_after_header=True,
    )  # fmt: skip
    adapter = _Adapter(tls, max_retries=retry, pool_connections=8, pool_maxsize=connections)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    session.mount("file://", _FileAdapter())
    # requests itself looks at REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE first.
    authorities = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    if authorities is not None:
        session.verify = authorities
    return session


@contextmanager
def get(
    session: requests.Session, url: str, *, headers: Mapping[str, str] | None = None
) -> Iterator[requests.Response]:
    """GET ``url``; inside the block the body can be read with ``chunks``, or left unread.

    A status of 416 is returned, not raised: it answers a question about ranges.

    Raises:
        NotFoundError, RefusedError, OutOfReachError: as their names say, after retries.
        InputError: it is no URL.

    """
    with send(session, "GET", url, headers=headers) as response:
        if response.status_code in {404, 410}:
            raise NotFoundError(url)
        if response.status_code in {401, 403, 407}:
            raise RefusedError(url, response.status_code)
        if response.status_code >= 400 and response.status_code != 416:
            raise OutOfReachError(url, f"the server answers with status {response.status_code}")
        yield response


def send(
    session: requests.Session,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | Iterable[bytes] | None = None,
    auth: requests.auth.AuthBase | None = None,
    redirects: bool = True,
    read_seconds: float | None = None,
) -> requests.Response:
    """Send one request and return the answer, whatever its status, with its body not read yet; the caller closes it.

    ``auth`` replaces what the machine's netrc says. A ``body`` that is not bytes must have a length and be good for
    being sent again when the session repeats the method. ``read_seconds`` is how long the server may stay silent.

    Raises:
        OutOfReachError: there was no answer, after the session's retries.
        InputError: it is no URL.

    """
    timeout = None if read_seconds is None else (_CONNECT_SECONDS, read_seconds)
    # The variables that name certificate files must not turn verification on again where the session has it off.
    verify = False if session.verify is False else None
    try:
        return session.request(
            method, url, headers=headers, data=body, auth=auth, stream=True, allow_redirects=redirects,
            timeout=timeout, verify=verify,
        )  # fmt: skip
    except (
        requests.exceptions.InvalidURL,
        requests.exceptions.MissingSchema,
        requests.exceptions.InvalidSchema,
    ) as error:
        raise InputError(f"`{redact(url)}` is not a URL that can be fetched") from error
    except (requests.RequestException, HTTPError) as error:
        raise OutOfReachError(url, _reason(error)) from error
    except OSError as error:
        raise OutOfReachError(url, str(error), hint="check the variables that name certificate files") from error


def retry_after(response: requests.Response) -> float | None:
    """Return the seconds that an answer asks to wait (Retry-After), at most a minute; None when it does not."""
    header = response.headers.get("Retry-After")
    try:
        return None if header is None else min(Retry().parse_retry_after(header), _MOST_RETRY_AFTER)
    except InvalidHeader:
        return None


def chunks(response: requests.Response, *, decode: bool = False) -> Iterator[bytes]:
    """Yield a response's body in pieces: the bytes as sent, or decoded (``Content-Encoding``).

    Raises:
        BrokenOffError: the body ended early or stopped coming.

    """
    try:
        for data in response.raw.stream(CHUNK, decode_content=decode):
            parallel.checkpoint()
            yield data
    except (HTTPError, OSError) as error:
        raise BrokenOffError(response.url, _reason(error)) from error


def piece(response: requests.Response) -> bytes:
    """Return what has come of a response's body, as sent: up to ``CHUNK`` bytes, none at its end; waits for the first.

    Raises: as ``chunks``.
    """
    try:
        data: bytes = response.raw.read1(CHUNK, decode_content=False)
    except (HTTPError, OSError) as error:
        raise BrokenOffError(response.url, _reason(error)) from error
    return data


def read(session: requests.Session, url: str, *, headers: Mapping[str, str] | None = None) -> Page:
    """Return a whole page, asked for again when its body breaks off. For pages that fit in memory.

    Raises: as ``get`` and ``chunks``.
    """
    for _ in range(_BODY_ATTEMPTS - 1):
        try:
            return _read_once(session, url, headers)
        except BrokenOffError:
            continue
    return _read_once(session, url, headers)


def _read_once(session: requests.Session, url: str, headers: Mapping[str, str] | None) -> Page:
    with get(session, url, headers=headers) as response:
        media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return Page(response.url, media_type, b"".join(chunks(response, decode=True)))


class _Retry(Retry):
    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: urllib3.BaseHTTPResponse | None = None,
        error: Exception | None = None,
        _pool: ConnectionPool | None = None,
        _stacktrace: TracebackType | None = None,
    ) -> Self:
        """Count a failure; a certificate that is not trusted will not be the next time either."""
        if error is not None and any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error)):
            raise error
        return super().increment(method, url, response, error, _pool, _stacktrace)

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        """Return what the server asks for, within reason: a limit of an hour is told to the user instead."""
        seconds = super().get_retry_after(response)
        return None if seconds is None else min(seconds, _MOST_RETRY_AFTER)


class _Adapter(HTTPAdapter):
    def __init__(self, tls: ssl.SSLContext | None, **options: Any) -> None:
        self._tls = tls
        super().__init__(**options)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        if self._tls is not None:
            options["ssl_context"] = self._tls
        super().init_poolmanager(*args, **options)

    def proxy_manager_for(self, proxy: str, **options: Any) -> urllib3.ProxyManager:
        if self._tls is not None:
            options["ssl_context"] = self._tls
        manager: urllib3.ProxyManager = super().proxy_manager_for(proxy, **options)
        return manager

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        if options.get("timeout") is None:
            options["timeout"] = (_CONNECT_SECONDS, _read_seconds())
        return super().send(request, *args, **options)


class _FileAdapter(BaseAdapter):
    """Answers GET on ``file://`` URLs: files with ranges, folders by their index.html or a list of links."""

    def send(self, request: requests.PreparedRequest, *_args: Any, **_options: Any) -> requests.Response:
        response = requests.Response()
        response.request, response.url, response.status_code = request, request.url or "", 200
        body, kind = _open_local(Path(url2pathname(urlsplit(response.url).path)))
        if body is None:
            body, response.status_code = io.BytesIO(), 404
        size = body.seek(0, os.SEEK_END)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        start, end = (int(match[1]), min(int(match[2] or size), size - 1)) if match else (0, size - 1)
        if match and response.status_code == 200:
            response.status_code = 206 if start <= end else 416
            response.headers["Content-Range"] = f"bytes {start}-{end}/{size}"
        body.seek(start)
        if end < size - 1:
            with body as whole:
                body = io.BytesIO(whole.read(end - start + 1))
        response.headers.update({"Content-Type": kind, "Content-Length": str(max(0, end - start + 1))})
        response.raw = urllib3.HTTPResponse(
            body, headers=response.headers, status=response.status_code, preload_content=False
        )
        return response

    def close(self) -> None:
        """Close nothing: no connection is kept."""


def _open_local(path: Path) -> tuple[io.BufferedIOBase | None, str]:
    page = path / "index.html"
    try:
        if path.is_dir() and not page.exists():
            names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in path.iterdir())
            links = (f'<a href="{html.escape(quote(name))}">{html.escape(name)}</a>\n' for name in names)
            return io.BytesIO("".join(links).encode()), "text/html"
        is_page = path.is_dir() or path.suffix == ".html"
        return (page if path.is_dir() else path).open("rb"), "text/html" if is_page else "application/octet-stream"
    except OSError:
        return None, "text/plain"


def _read_seconds() -> float:
    for name in ("UV_HTTP_TIMEOUT", "PIP_DEFAULT_TIMEOUT"):
        try:
            return max(1.0, float(os.environ[name]))
        except (KeyError, ValueError):
            continue
    return _READ_SECONDS


#: What an exception comes down to, in a few words; the first that fits.
_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (NameResolutionError, "the name of the host cannot be resolved"),
    (ReadTimeoutError, "timed out"),
    (ConnectTimeoutError, "timed out"),
    (TimeoutError, "timed out"),
    (ConnectionRefusedError, "the connection was refused"),
    (ConnectionError, "the connection was reset"),
    (IncompleteRead, "the answer ended early"),
    (requests.exceptions.TooManyRedirects, "too many redirects"),
)


def _reason(error: BaseException) -> str:
    """Say in a few words what an exception of requests or urllib3 comes down to."""
    for cause in _causes(error):
        if isinstance(cause, (SSLError, ssl.SSLError)):
            return f"no secure connection: {_ssl_reason(cause)}"
        for kind, text in _REASONS:
            if isinstance(cause, kind):
                return text
        if isinstance(cause, OSError) and cause.errno in {errno.ENETUNREACH, errno.EHOSTUNREACH}:
            return "there is no way to the host"
    return "the connection failed"


def _hint(reason: str) -> str:
    if "certificate" in reason:
        return "name the file of your certificate authorities with SSL_CERT_FILE"
    return "check the network, the proxy and the URL; then run again"


def _ssl_reason(error: BaseException) -> str:
    text = str(error)
    match = re.search(r"certificate verify failed: ([^(\]]+)", text)
    return f"the certificate is not trusted ({match[1].strip()})" if match else "TLS failed"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions an exception is made of, the innermost first."""
    inner: list[BaseException] = []
    seen: set[int] = set()

    def visit(value: object) -> None:
        if isinstance(value, BaseException) and id(value) not in seen:
            seen.add(id(value))
            for part in (*value.args, getattr(value, "reason", None), value.__cause__, value.__context__):
                visit(part)
            inner.append(value)

    visit(error)
    yield from inner
