from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from envbuilder import http
from envbuilder.errors import InputError
from envbuilder.run import run
from tests.indexes import serve
from tests.wheelmaker import make_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import requests

    from tests.indexes import IndexServer

WHEEL = make_wheel("pkg", files={"pkg.py": "x = 1\n" * 1000})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[IndexServer]:
    with serve(tmp_path / "index") as server:
        server.add(WHEEL)
        yield server


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with http.new_session(retries=2, backoff=0.01) as session:
        yield session


def file_url(server: IndexServer) -> str:
    return server.url.replace("/simple/", f"/files/pkg/{WHEEL.file}")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host.test/simple/", "https://host.test/simple/"),
        ("https://user:secret@host.test:8443/simple/", "https://****@host.test:8443/simple/"),
        ("https://secret@host.test/x", "https://****@host.test/x"),
        ("https://host.test/f.whl?signature=secret#sha256=00", "https://host.test/f.whl"),
        ("file:///folder/x", "file:///folder/x"),
        ("https://user:secret@[x/", "(a malformed URL)"),
    ],
)
def test_redact(url: str, shown: str):
    assert http.redact(url) == shown


def test_read_says_who_it_is(server: IndexServer, session: requests.Session):
    page = http.read(session, server.url)
    assert page.media_type == "text/html"
    assert b"pkg" in page.body
    assert server.requests[-1].user_agent.startswith("envbuilder/")


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_is_temporary_is_tried_again(server: IndexServer, session: requests.Session, status: int):
    server.fail("/simple/", status=status, times=2)
    assert http.read(session, server.url).body
    assert len(server.requests) == 3


def test_what_stays_temporary_is_out_of_reach(server: IndexServer, session: requests.Session):
    server.fail("/simple/", status=503)
    with pytest.raises(http.OutOfReachError, match="answers with status 503") as caught:
        http.read(session, server.url)
    assert caught.value.exit_code == 3
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 418, 501])
def test_what_is_not_temporary_is_asked_once(server: IndexServer, session: requests.Session, status: int):
    server.fail("/simple/", status=status)
    with pytest.raises(http.OutOfReachError):
        http.read(session, server.url)
    assert len(server.requests) == 1


def test_retry_after_is_honoured_within_reason(
    server: IndexServer, session: requests.Session, monkeypatch: pytest.MonkeyPatch
):
    waited: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", waited.append)
    server.fail("/simple/", status=503, retry_after="7", times=1)
    server.fail("/simple/", status=429, retry_after="86400", times=1)
    http.read(session, server.url)
    assert [seconds for seconds in waited if seconds] == [7, 60]


def test_a_body_that_breaks_off_is_asked_for_again(server: IndexServer, session: requests.Session):
    server.fail("/simple/", cut=3, times=2)
    assert http.read(session, server.url).body
    server.fail("/simple/", cut=3, times=3)
    with pytest.raises(http.BrokenOffError):
        http.read(session, server.url)


def test_not_found(server: IndexServer, session: requests.Session):
    with pytest.raises(http.NotFoundError) as caught:
        http.read(session, f"{server.url}nothing/")
    assert caught.value.exit_code == 2


def test_credentials_are_used_and_never_shown(server: IndexServer, session: requests.Session):
    server.credentials = ("user", "secret")
    assert http.read(session, server.url_with_credentials).body
    server.credentials = ("user", "other")
    with pytest.raises(http.RefusedError) as caught:
        http.read(session, server.url.replace("://", "://user:secret@"))
    assert caught.value.exit_code == 3
    assert "secret" not in f"{caught.value} {caught.value.hint}"


def test_netrc_is_honoured(
    server: IndexServer, session: requests.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    server.credentials = ("user", "secret")
    assert http.read(session, server.url).body


def test_refused_connection_and_unknown_host(session: requests.Session):
    with pytest.raises(http.OutOfReachError, match=r"127\.0\.0\.1:9/: the connection was refused"):
        http.read(session, "http://127.0.0.1:9/")
    with pytest.raises(http.OutOfReachError, match="cannot be resolved"):
        http.read(session, "http://no-such-host.invalid/")


@pytest.mark.parametrize("url", ["no url", "gopher://host.test/", "http://", "http://[x/"])
def test_not_a_url(session: requests.Session, url: str):
    with pytest.raises(InputError, match="not a URL"):
        http.read(session, url)


def test_slow_server_times_out(server: IndexServer, session: requests.Session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "_read_seconds", lambda: 0.1)
    server.fail("*.whl", slow=0.4)
    with pytest.raises(http.BrokenOffError, match="timed out"), http.get(session, file_url(server)) as response:
        list(http.chunks(response))


def test_authorities_as_pip_and_uv_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "authorities.pem"
    file.touch()
    for name in ("PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert http.new_session().verify == str(file)
    monkeypatch.setenv("PIP_CERT", "pip.pem")
    assert http.new_session().verify == "pip.pem"


def test_authorities_that_are_not_there(monkeypatch: pytest.MonkeyPatch):
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CERT", "nowhere.pem")
    with http.new_session() as session, pytest.raises(http.OutOfReachError, match=r"nowhere\.pem"):
        http.read(session, "https://127.0.0.1:9/")


def test_certificate_that_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    run([
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-keyout", key, "-out", certificate, "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
    ])  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    with serve(tmp_path / "index", tls=context) as server:
        with http.new_session() as session, pytest.raises(http.OutOfReachError, match="not trusted") as caught:
            http.read(session, server.url)
        assert caught.value.hint is not None
        assert "SSL_CERT_FILE" in caught.value.hint
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with http.new_session() as session:
            assert http.read(session, server.url).body


def test_timeouts_as_pip_and_uv_have_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "180")
    monkeypatch.delenv("UV_HTTP_TIMEOUT", raising=False)
    assert http._read_seconds() == 180
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "nonsense")
    assert http._read_seconds() == 180
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "5")
    assert http._read_seconds() == 5


def test_files_answer_like_a_server(session: requests.Session, tmp_path: Path):
    (tmp_path / "a b").mkdir()
    file = tmp_path / "data.bin"
    file.write_bytes(b"0123456789")

    def ask(range_: str | None) -> tuple[int, str | None, bytes]:
        headers = {"Range": range_} if range_ else None
        with http.get(session, file.as_uri(), headers=headers) as response:
            return response.status_code, response.headers.get("Content-Range"), b"".join(http.chunks(response))

    assert ask(None) == (200, None, b"0123456789")
    assert ask("bytes=7-") == (206, "bytes 7-9/10", b"789")
    assert ask("bytes=2-4") == (206, "bytes 2-4/10", b"234")
    assert ask("bytes=10-")[0] == 416
    listing = http.read(session, tmp_path.as_uri())
    assert listing.media_type == "text/html"
    assert b'href="a%20b/"' in listing.body
    with pytest.raises(http.NotFoundError):
        http.read(session, (tmp_path / "nothing").as_uri())
