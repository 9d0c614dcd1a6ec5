from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.registry.certificates import CertificateError
from envbuilder.registry.client import open_repository
from envbuilder.registry.errors import RegistryUnreachableError, WrongAnswerError
from envbuilder.registry.reference import Reference
from tests.registries import Authority, fake_registry, make_authority, quick_retries
from tests.registry.fakeserver import RegistryHandler

if TYPE_CHECKING:
    from pathlib import Path

    from tests.registries import FakeRegistry


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


def check(registry: FakeRegistry) -> None:
    open_repository(Reference.parse(f"{registry.address}/team/app")).check()


def put(registry: FakeRegistry) -> None:
    there = open_repository(Reference.parse(f"{registry.address}/team/app"), push=True)
    there.put_blob(Digest.of(b"x"), 1, lambda: io.BytesIO(b"x"), lambda _: None)


def test_authority_that_is_not_known(authority: Authority, configuration: Path):
    with fake_registry(tls=authority.context()) as registry:
        with pytest.raises(RegistryUnreachableError, match="the certificate is not trusted") as caught:
            check(registry)
        assert f"certs.d/{registry.address}/ca.crt" in (caught.value.hint or "")
        assert registry.requests == []  # and plain HTTP was not tried instead
        authority.trust(configuration, registry.address)
        check(registry)


def test_it_is_trusted_for_its_host_alone(authority: Authority, configuration: Path):
    with fake_registry(tls=authority.context()) as registry:
        authority.trust(configuration, "127.0.0.1:1")
        with pytest.raises(RegistryUnreachableError, match="not trusted"):
            check(registry)


def test_docker_folder(authority: Authority, configuration: Path):
    with fake_registry(tls=authority.context()) as registry:
        folder = configuration / "certs.d" / registry.address
        folder.mkdir(parents=True)
        (folder / "any-name.crt").write_bytes(authority.certificate.read_bytes())
        check(registry)


def test_authority_by_variable(authority: Authority, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    with fake_registry(tls=authority.context()) as registry:
        check(registry)


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_insecure(authority: Authority, configuration: Path, monkeypatch: pytest.MonkeyPatch, variable: str):
    with fake_registry(tls=authority.context()) as registry:
        (configuration / "containers").mkdir()
        text = f'[[registry]]\nlocation = "{registry.address}"\ninsecure = true\n'
        (configuration / "containers" / "registries.conf").write_text(text)
        monkeypatch.setenv(variable, str(authority.server[0]))
        check(registry)


def test_client_certificate(authority: Authority, configuration: Path, monkeypatch: pytest.MonkeyPatch):
    quick_retries(monkeypatch, retries=0)
    with fake_registry(tls=authority.context(ask_client=True)) as registry:
        authority.trust(configuration, registry.address)
        with pytest.raises(RegistryUnreachableError):
            check(registry)
        authority.trust(configuration, registry.address, client=True)
        check(registry)


def test_files_that_cannot_be_used(authority: Authority, configuration: Path):
    with fake_registry(tls=authority.context()) as registry:
        authority.trust(configuration, registry.address, client=True)
        folder = configuration / "containers" / "certs.d" / registry.address
        (folder / "client.key").unlink()
        with pytest.raises(CertificateError, match=r"client\.cert: its key client\.key is not beside it"):
            check(registry)
        (folder / "client.cert").unlink()
        (folder / "ca.crt").write_text("no certificate")
        with pytest.raises(CertificateError, match=r"ca\.crt: holds no authority's certificate") as caught:
            check(registry)
        assert caught.value.exit_code == 2


def test_registry_behind_a_proxy_that_ends_tls(
    authority: Authority, configuration: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such a registry says `http` of itself: the same host is asked securely."""
    monkeypatch.setattr(RegistryHandler, "_origin", lambda handler: f"http://{handler.registry.address}")
    with fake_registry(tls=authority.context(), absolute=True) as registry:
        authority.trust(configuration, registry.address)
        put(registry)
        assert registry.lines("POST *")


def test_secure_registry_does_not_lead_to_plain_http(
    authority: Authority, configuration: Path, monkeypatch: pytest.MonkeyPatch
):
    with fake_registry(tls=authority.context()) as registry:
        authority.trust(configuration, registry.address)
        monkeypatch.setattr(RegistryHandler, "_session", lambda *_: {"Location": "http://other.test/x?hush"})
        with pytest.raises(WrongAnswerError, match=r"sends us to http://other\.test/x, which is not secure"):
            put(registry)


def test_token_server_must_be_secure(authority: Authority, configuration: Path, monkeypatch: pytest.MonkeyPatch):
    with fake_registry(tls=authority.context()) as registry:
        authority.trust(configuration, registry.address)
        registry.credentials = ("user", "secret")
        challenge = 'Bearer realm="http://auth.test/token"'
        monkeypatch.setattr("tests.registry.fakeserver.CHALLENGE", challenge)
        with pytest.raises(WrongAnswerError, match="not secure"):
            check(registry)
