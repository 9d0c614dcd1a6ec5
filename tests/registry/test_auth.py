from __future__ import annotations

import base64
import io
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.registry.auth import Challenge, challenges, grants_of, scopes_of
from envbuilder.registry.client import open_repository
from envbuilder.registry.errors import AccessRefusedError, WrongAnswerError
from envbuilder.registry.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.registries import FakeRegistry

BLOB = bytes(range(256)) * 16


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", []),
        ("Basic", [("basic", {})]),
        ('Basic realm="a, b=c"', [("basic", {"realm": "a, b=c"})]),
        (
            'Bearer realm="https://auth.test/token",service="registry.test",scope="repository:a/b:pull,push"',
            [("bearer", {"realm": "https://auth.test/token", "service": "registry.test", "scope": "repository:a/b:pull,push"})],
        ),
        ('BEARER Realm = "x" , Error=invalid_token', [("bearer", {"realm": "x", "error": "invalid_token"})]),
        (
            'Negotiate, Basic realm="one", Bearer realm="two"',
            [("negotiate", {}), ("basic", {"realm": "one"}), ("bearer", {"realm": "two"})],
        ),
        ('NTLM abc+/==, Basic realm="x"', [("ntlm", {}), ("basic", {"realm": "x"})]),
        (r'Basic realm="say \"hi\" \\"', [("basic", {"realm": r'say "hi" \ '.strip()})]),
        (', ,Basic realm=plain,, charset="UTF-8"', [("basic", {"realm": "plain", "charset": "UTF-8"})]),
        ('Bearer realm="never ends', [("bearer", {})]),
        ('"what"', []),
    ],
)  # fmt: skip
def test_challenges(header: str, expected: list[tuple[str, dict[str, str]]]):
    found = challenges(header)
    if header == 'Bearer realm="never ends':
        assert found[0].parameters.get("realm") is None
    else:
        assert found == [Challenge(scheme, parameters) for scheme, parameters in expected]


def test_scopes():
    grants = grants_of("repository:a/b:push,pull registry:catalog:* repository:host:5000/c:pull")
    assert ("repository", "host:5000/c", "pull") in grants
    assert scopes_of(grants) == ["registry:catalog:*", "repository:a/b:pull,push", "repository:host:5000/c:pull"]


def log_in(configuration: Path, host: str, entry: dict[str, Any] | None = None, password: str = "secret") -> None:  # noqa: S107 (it is one)
    encoded = base64.b64encode(f"user:{password}".encode()).decode()
    (configuration / "config.json").write_text(json.dumps({"auths": {host: entry or {"auth": encoded}}}))


def put_and_read(registry: FakeRegistry, repository: str = "team/app") -> None:
    there = open_repository(Reference.parse(f"{registry.address}/{repository}"))
    there.put_blob(Digest.of(BLOB), len(BLOB), lambda: io.BytesIO(BLOB), lambda _: None)
    with there.read_blob(Digest.of(BLOB)) as pieces:
        assert b"".join(pieces) == BLOB


@pytest.mark.parametrize("tokens", [False, True])
def test_user_and_password(registry: FakeRegistry, configuration: Path, *, tokens: bool):
    registry.credentials, registry.tokens = ("user", "secret"), tokens
    log_in(configuration, registry.address)
    put_and_read(registry)
    assert len(registry.lines("* /token")) == (1 if tokens else 0)  # one token, to pull and push, was enough


def test_password_never_goes_to_a_registry_that_takes_tokens(registry: FakeRegistry, configuration: Path):
    registry.credentials, registry.tokens = ("user", "secret"), True
    log_in(configuration, registry.address)
    put_and_read(registry)
    sent = [r.headers.get("authorization", "") for r in registry.requests if r.path != "/token"]
    assert sent
    assert not any(header.startswith("Basic") for header in sent)


def test_identity_token(registry: FakeRegistry, configuration: Path):
    registry.identity_token, registry.tokens = "hush", True
    log_in(configuration, registry.address, {"identitytoken": "hush"})
    put_and_read(registry)
    assert registry.lines("* /token") == ["POST /token"]
    registry.identity_token = "another"  # noqa: S105 (it is one)
    with pytest.raises(AccessRefusedError) as caught:
        put_and_read(registry)
    assert "hush" not in str(caught.value)


def test_registry_token(registry: FakeRegistry, configuration: Path):
    registry.tokens = True
    token = registry.new_token(frozenset({"repository:team/app:pull,push"}))
    log_in(configuration, registry.address, {"registrytoken": token})
    put_and_read(registry)
    assert registry.lines("* /token") == []
    registry.expire_tokens()
    with pytest.raises(AccessRefusedError):
        put_and_read(registry)


def test_nobody_may_read(registry: FakeRegistry):
    registry.credentials, registry.tokens, registry.anonymous = ("user", "secret"), True, True
    digest = registry.add_image("team/app", "v1", b"layer")
    there = open_repository(Reference.parse(registry.reference("team/app")))
    assert there.manifest("v1").descriptor.digest == digest
    with pytest.raises(AccessRefusedError, match="UNAUTHORIZED: authentication required") as caught:
        there.put_manifest(b"{}", "application/vnd.oci.image.manifest.v1+json", "v2")
    assert caught.value.exit_code == 3
    assert f"docker login {registry.address}" in (caught.value.hint or "")


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_refused(
    registry: FakeRegistry, configuration: Path, caplog: pytest.LogCaptureFixture, *, tokens: bool, known: bool
):
    caplog.set_level(logging.DEBUG, "envbuilder")
    registry.credentials, registry.tokens = ("user", "secret"), tokens
    if known:
        log_in(configuration, registry.address, password="hush-hush")  # noqa: S106 (a wrong one)
    there = partial(open_repository, Reference.parse(registry.reference("team/app")))
    acts: list[Callable[[], object]] = [
        lambda: there().check(), lambda: there().resolve("v1"), lambda: there().manifest("v1"),
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(AccessRefusedError) as caught:
            act()
        assert (caught.value.exit_code, caught.value.status) == (3, 401)
        assert f"docker login {registry.address}" in (caught.value.hint or "")
        shown = f"{caught.value!r} {caught.value.hint} {caplog.text}"
        assert "hush-hush" not in shown
        assert base64.b64encode(b"user:hush-hush").decode() not in shown


def test_a_secret_that_the_registry_repeats_is_not_shown(registry: FakeRegistry, configuration: Path):
    registry.credentials, registry.tokens = ("user", "secret"), True
    log_in(configuration, registry.address)
    there = open_repository(Reference.parse(registry.reference("team/app")))
    there.check()
    token = next(iter(registry.given))
    message = f"password secret and Bearer {token} at https://store.test/x?signature=hush\x1b[31m are wrong"
    registry.fail("GET */manifests/*", status=400, code="DENIED", message=message)
    with pytest.raises(Exception, match="DENIED") as caught:
        there.manifest("v1")
    shown = str(caught.value)
    assert "password **** and Bearer **** at https://store.test/x" in shown
    assert not any(bad in shown for bad in (token, "hush", "\x1b"))


@pytest.mark.parametrize(
    "expire",
    [lambda r: r.expire_tokens(), lambda r: setattr(r, "token_seconds", 300)],
    ids=["the registry forgets it", "by its time"],
)
def test_token_that_expires_in_the_middle_of_an_upload(
    registry: FakeRegistry, configuration: Path, monkeypatch: pytest.MonkeyPatch, expire: Callable[[FakeRegistry], None]
):
    registry.credentials, registry.tokens = ("user", "secret"), True
    log_in(configuration, registry.address)
    there = open_repository(Reference.parse(f"{registry.address}/team/app"))
    sent: list[int] = []
    clock = time.monotonic

    def progress(amount: int) -> None:
        if not sent:
            expire(registry)
            monkeypatch.setattr("envbuilder.registry.auth.time.monotonic", lambda: clock() + 400)
        sent.append(amount)

    there.put_blob(Digest.of(BLOB), len(BLOB), lambda: io.BytesIO(BLOB), progress)
    assert registry.blobs["team/app"][str(Digest.of(BLOB))] == BLOB
    assert sum(sent) == len(BLOB)
    assert len(registry.lines("* /token")) == 2


def test_threads_share_one_token(registry: FakeRegistry, configuration: Path):
    registry.credentials, registry.tokens = ("user", "secret"), True
    log_in(configuration, registry.address)
    registry.add_image("team/app", "v1", b"layer")
    registry.fail("GET /token", slow=0.05)
    there = open_repository(Reference.parse(registry.reference("team/app")))
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: there.resolve("v1"), range(16)))
    assert len(registry.lines("* /token")) == 1


def test_mount_asks_for_the_right_to_read_there(registry: FakeRegistry, configuration: Path):
    registry.credentials, registry.tokens = ("user", "secret"), True
    log_in(configuration, registry.address)
    digest = registry.add_blob("other/app", BLOB)
    assert open_repository(Reference.parse(f"{registry.address}/team/app"), push=True).mount(digest, "other/app")
    query = next(r.query for r in registry.requests if r.path == "/token")
    assert "scope=repository%3Aother%2Fapp%3Apull&scope=repository%3Ateam%2Fapp%3Apull%2Cpush" in query


@pytest.mark.parametrize(
    ("challenge", "reason"),
    [
        ('Negotiate, Digest realm="x"', "offers `negotiate`, `digest`"),
        ("Bearer service=x", "offers `bearer`"),
        ('Bearer realm="http://auth.test/token"', "connection that is not secure"),
        ('Bearer realm="gopher://auth.test/token"', "connection that is not secure"),
    ],
)
def test_what_cannot_be_satisfied(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, challenge: str, reason: str):
    registry.credentials = ("user", "secret")
    monkeypatch.setattr("tests.registry.fakeserver.CHALLENGE", challenge)
    with pytest.raises(WrongAnswerError, match=reason):
        open_repository(Reference.parse(registry.reference("team/app"))).check()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"token": 1}', b'{"token": "a\\nb"}', b'{"token": "x", "expires_in": "soon"}']
)
def test_token_server_that_gives_none(registry: FakeRegistry, body: bytes):
    registry.tokens = True
    registry.fail("GET /token", body=body)
    with pytest.raises(WrongAnswerError, match="answers without a token"):
        open_repository(Reference.parse(registry.reference("team/app"))).check()


def test_netrc_is_not_for_registries(registry: FakeRegistry, configuration: Path):
    (configuration / ".netrc").write_text("machine 127.0.0.1 login user password secret\n")
    registry.add_image("team/app", "v1", b"layer")
    assert open_repository(Reference.parse(registry.reference("team/app"))).resolve("v1") is not None
    assert all("authorization" not in request.headers for request in registry.requests)
