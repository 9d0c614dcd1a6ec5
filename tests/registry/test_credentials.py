from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from envbuilder.registry.credentials import Credentials, CredentialsFileError, HelperError, find_credentials
from envbuilder.registry.reference import Reference

if TYPE_CHECKING:
    from pathlib import Path


def basic(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def write(file: Path, **document: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document))
    return file


def user(text: str) -> str | None:
    found = find_credentials(Reference.parse(text))
    return None if found is None else found.user


def helper(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put `docker-credential-test` on PATH; what it is asked lies in `asked`."""
    program = folder / "bin" / "docker-credential-test"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nserver=$(cat)\necho "$1 $server" >> {folder}/asked\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def test_nothing_is_known():
    assert find_credentials(Reference.parse("registry.test/app")) is None


def test_docker_configuration(configuration: Path):
    file = write(configuration / "config.json", auths={"registry.test": basic("user", "se:cret")}, other={"x": 1})
    found = find_credentials(Reference.parse("registry.test/team/app"))
    assert found == Credentials(str(file), "user", "se:cret")
    assert base64.b64decode(found.basic) == b"user:se:cret"
    assert user("other.test/app") is None
    assert user("registry.test:5000/app") is None


def test_their_repr_hides_them(configuration: Path):
    write(configuration / "config.json", auths={"registry.test": basic("user", "secret") | {"identitytoken": "hush"}})
    shown = repr(find_credentials(Reference.parse("registry.test/app")))
    assert "config.json" in shown
    assert not any(secret in shown for secret in ("user", "secret", "hush"))


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "index.docker.io", "docker.io", "registry-1.docker.io"])
@pytest.mark.parametrize("text", ["python", "docker.io/team/app"])
def test_docker_hub_under_all_its_names(configuration: Path, key: str, text: str):
    write(configuration / "config.json", auths={key: basic("user", "secret")})
    assert user(text) == "user"
    # The client itself asks for the place.
    assert find_credentials(Reference("registry-1.docker.io", "library/python")) is not None


@pytest.mark.parametrize(
    "key", ["https://registry.test", "https://registry.test/v1/", "registry.test/v2/", "registry.test/"]
)
def test_old_forms_of_keys(configuration: Path, key: str):
    write(configuration / "config.json", auths={key: basic("user", "secret")})
    assert user("registry.test/app") == "user"


def test_the_narrowest_key_counts(configuration: Path):
    auths = {"registry.test": "all", "registry.test/team": "team", "registry.test/team/app": "app"}
    write(configuration / "containers" / "auth.json", auths={key: basic(name, "x") for key, name in auths.items()})
    assert user("registry.test/team/app:v1") == "app"
    assert user("registry.test/team/other") == "team"
    assert user("registry.test/teams/app") == "all"


def test_order_of_files(configuration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def entry(name: str) -> dict[str, Any]:
        return {"auths": {"registry.test": basic(name, "x")}}

    write(configuration / "containers" / "auth.json", **entry("config home"))
    assert user("registry.test/app") == "config home"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    write(tmp_path / "containers" / "auth.json", **entry("runtime"))
    assert user("registry.test/app") == "runtime"
    write(configuration / "config.json", **entry("docker"))
    assert user("registry.test/app") == "docker"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(write(tmp_path / "auth.json", **entry("explicit"))))
    assert user("registry.test/app") == "explicit"
    assert user("other.test/app") is None


def test_tokens(configuration: Path):
    entries = {"a.test": {"auth": "", "identitytoken": "one"}, "b.test": {"registrytoken": "two"}, "c.test": {}}
    write(configuration / "config.json", auths=entries)
    found = [find_credentials(Reference.parse(f"{host}/app")) for host in entries]
    assert [c and (c.identity_token, c.registry_token, c.basic) for c in found] == [
        ("one", "", ""),
        ("", "two", ""),
        None,
    ]


@pytest.mark.parametrize("where", [{"credHelpers": {"registry.test": "test"}}, {"credsStore": "test"}])
def test_helper(configuration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: dict[str, Any]):
    write(configuration / "config.json", auths={"registry.test": {}}, **where)
    helper(tmp_path, monkeypatch, """echo '{"ServerURL": "x", "Username": "user", "Secret": "secret"}'""")
    found = find_credentials(Reference.parse("registry.test/app"))
    assert found == Credentials("`docker-credential-test`", "user", "secret")
    assert (tmp_path / "asked").read_text() == "get registry.test\n"


def test_helper_is_asked_for_docker_hub_by_its_old_name(
    configuration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(configuration / "config.json", credsStore="test")
    helper(tmp_path, monkeypatch, """echo '{"Username": "<token>", "Secret": "hush"}'""")
    found = find_credentials(Reference.parse("python"))
    assert found is not None
    assert (found.user, found.identity_token) == ("", "hush")
    assert (tmp_path / "asked").read_text() == "get https://index.docker.io/v1/\n"


def test_helper_that_knows_nothing(configuration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(configuration / "config.json", credsStore="test", auths={"registry.test": basic("from file", "x")})
    helper(tmp_path, monkeypatch, "echo 'credentials not found in native keychain'; exit 1")
    assert user("registry.test/app") == "from file"
    assert user("other.test/app") is None


def test_helper_that_fails_or_is_missing(configuration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(configuration / "config.json", credsStore="test")
    with pytest.raises(
        HelperError, match="names the credential helper `docker-credential-test`, which is not installed"
    ) as caught:
        user("registry.test/app")
    assert caught.value.exit_code == 4
    assert "config.json" in (caught.value.hint or "")
    helper(tmp_path, monkeypatch, "echo 'the keychain is locked'; exit 1")
    with pytest.raises(HelperError, match=r"failed for registry\.test: the keychain is locked"):
        user("registry.test/app")
    (tmp_path / "bin" / "docker-credential-test").write_text("#!/bin/sh\necho secret\n")
    with pytest.raises(HelperError, match="did not answer with credentials") as caught:
        user("registry.test/app")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not valid JSON, line 1"),
        ("[]", "is not a JSON object"),
        ('{"auths": []} ', None),
        ('{"auths": [1]}', "auths is not a JSON object"),
        ('{"auths": {"registry.test": "secret"}}', "auths.registry.test is not a JSON object"),
        ('{"auths": {"registry.test": {"auth": "secret!"}}}', "auths.registry.test.auth is not valid base64"),
        ('{"auths": {"registry.test": {"auth": "c2VjcmV0"}}}', "is not a user and a password"),
        ('{"credsStore": "../secret"}', "is not a name"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_files_that_are_not_valid(configuration: Path, text: str, reason: str | None):
    (configuration / "config.json").write_text(text)
    if reason is None:
        assert user("registry.test/app") is None
        return
    with pytest.raises(CredentialsFileError, match=reason) as caught:
        user("registry.test/app")
    assert str(configuration) in caught.value.message
    assert "secret" not in caught.value.message.replace("../secret", "")


def test_file_that_cannot_be_read(configuration: Path):
    (configuration / "config.json").mkdir()
    with pytest.raises(CredentialsFileError, match="cannot be read"):
        user("registry.test/app")
