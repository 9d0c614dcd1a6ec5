from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import DOCKER_MANIFEST, INDEX, MANIFEST, canonical_json
from envbuilder.registry.client import open_repository
from envbuilder.registry.endpoint import MOST_BODY
from envbuilder.registry.errors import (
    AccessRefusedError,
    NotInRegistryError,
    RegistryUnreachableError,
    RejectedError,
    WrongAnswerError,
)
from envbuilder.registry.reference import NotAReferenceError, Reference
from tests.registries import fake_registry

if TYPE_CHECKING:
    from envbuilder.registry.client import Repository
    from tests.registries import FakeRegistry

KIND = "application/vnd.test.report.v1+json"
EMPTY = b"{}"


def there(registry: FakeRegistry, name: str = "team/app") -> Repository:
    return open_repository(Reference.parse(f"{registry.address}/{name}"))


def artifact(registry: FakeRegistry, subject: Digest, kind: str = KIND, **more: Any) -> bytes:
    """Return a manifest that refers to `subject`; its blobs are there."""
    digest = registry.add_blob("team/app", EMPTY)
    empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": str(digest), "size": 2}
    return canonical_json({
        "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": kind, "config": empty, "layers": [empty],
        "subject": {"mediaType": MANIFEST, "digest": str(subject), "size": 7}, **more,
    })  # fmt: skip


def test_check(registry: FakeRegistry):
    there(registry).check()
    assert registry.lines() == ["GET /v2/"]


def test_check_of_what_is_no_registry(registry: FakeRegistry):
    registry.fail("GET /v2/", status=404)
    with pytest.raises(WrongAnswerError, match="is no registry"):
        there(registry).check()


def test_manifest_by_tag_and_digest(registry: FakeRegistry):
    digest = registry.add_image("team/app", "v1", b"layer")
    repository = there(registry)
    by_tag = repository.manifest("v1")
    assert by_tag.descriptor.digest == digest == Digest.of(by_tag.data)
    assert by_tag.descriptor.media_type == MANIFEST
    assert repository.manifest(str(digest)) == by_tag
    assert repository.resolve("v1") == repository.resolve(str(digest)) == by_tag.descriptor
    assert MANIFEST in registry.requests[-1].headers["accept"]
    assert DOCKER_MANIFEST in registry.requests[-1].headers["accept"]


def test_absent(registry: FakeRegistry):
    repository, digest = there(registry), Digest.of(b"nothing")
    assert repository.resolve("v1") is None
    assert repository.resolve(str(digest)) is None
    assert not repository.has_blob(digest)
    for act in (lambda: repository.manifest("v1"), lambda: repository.blob(digest), lambda: list(repository.tags())):
        with pytest.raises(NotInRegistryError, match=r"team/app.*_UNKNOWN") as caught:
            act()
        assert (caught.value.exit_code, caught.value.status) == (2, 404)


@pytest.mark.parametrize("target", ["../x", "a/b", "", "sha256:12"])
def test_targets_are_tags_or_digests(registry: FakeRegistry, target: str):
    repository = there(registry)
    for act in (
        repository.resolve,
        repository.manifest,
        lambda target: repository.put_manifest(b"{}", MANIFEST, target),
    ):
        with pytest.raises(NotAReferenceError):
            act(target)
    with pytest.raises(NotAReferenceError):
        repository.mount(Digest.of(b""), "../x")
    assert registry.requests == []


def test_registry_that_says_little_to_head(registry: FakeRegistry):
    digest = registry.add_image("team/app", "v1", b"layer")
    registry.states_digest = False
    assert there(registry).resolve("v1") == there(registry).manifest("v1").descriptor
    registry.states_digest = True
    registry.fail("HEAD *", status=405)
    found = there(registry).resolve("v1")
    assert found is not None
    assert found.digest == digest


def test_error_of_head_has_the_registrys_words(registry: FakeRegistry):
    registry.fail("* */manifests/*", status=403, code="DENIED", message="not you")
    with pytest.raises(AccessRefusedError, match="DENIED: not you"):
        there(registry).resolve("v1")


@pytest.mark.parametrize("how", [{"corrupt": True}, {"short": 1}, {"digest": f"sha256:{'0' * 64}"}, {"body": b"{}"}])
def test_manifest_with_other_bytes(registry: FakeRegistry, how: dict[str, Any]):
    digest = registry.add_image("team/app", "v1", b"layer")
    registry.fail("GET */manifests/*", **how)
    with pytest.raises(WrongAnswerError, match=r"sends other bytes|is no manifest") as caught:
        there(registry).manifest("v1")
    assert caught.value.exit_code == 1
    if "digest" not in how:
        with pytest.raises(WrongAnswerError, match=f"sends other bytes.*{digest}"):
            there(registry).manifest(str(digest))


def test_media_type(registry: FakeRegistry):
    plain = registry.add_manifest("team/app", b'{"schemaVersion":2}', "plain", DOCKER_MANIFEST)
    assert there(registry).manifest(str(plain)).descriptor.media_type == DOCKER_MANIFEST
    document = json.dumps({"mediaType": INDEX}).encode()
    registry.add_manifest("team/app", document, "vague", "application/json; charset=utf-8")
    assert there(registry).manifest("vague").descriptor.media_type == INDEX
    registry.add_manifest("team/app", document, "confused", MANIFEST)
    with pytest.raises(WrongAnswerError, match="another type"):
        there(registry).manifest("confused")
    registry.add_manifest("team/app", b"<html>", "page", "text/html")
    with pytest.raises(WrongAnswerError, match="is no manifest"):
        there(registry).manifest("page")


def test_manifest_that_is_too_large(registry: FakeRegistry):
    registry.add_manifest("team/app", b" " * (MOST_BODY + 1), "v1")
    with pytest.raises(WrongAnswerError, match="larger than"):
        there(registry).manifest("v1")


def test_manifest_that_breaks_off(registry: FakeRegistry):
    registry.add_image("team/app", "v1", b"layer")
    registry.fail("GET */manifests/*", cut=10, times=2)
    registry.fail("GET */manifests/*", cut=10, reset=True, times=2)
    there(registry).manifest("v1")
    registry.fail("GET */manifests/*", cut=10)
    with pytest.raises(RegistryUnreachableError, match="the answer ended early"):
        there(registry).manifest("v1")


def test_put_manifest(registry: FakeRegistry):
    image = registry.add_image("team/app", "v1", b"layer")
    source = registry.manifests["team/app"][str(image)][1]
    digest = there(registry).put_manifest(source, MANIFEST, "v2")
    assert registry.tags["team/app"] == {"v1": str(digest), "v2": str(digest)}
    assert there(registry).put_manifest(source, MANIFEST, str(digest)) == digest
    with pytest.raises(WrongAnswerError, match=str(digest)):
        there(registry).put_manifest(source, MANIFEST, f"sha256:{'0' * 64}")


def test_put_manifest_is_repeated_when_its_answer_is_lost(registry: FakeRegistry):
    registry.fail("PUT *", cut=-1, reset=True, times=1)
    registry.fail("PUT *", status=503, times=1)
    there(registry).put_manifest(b"{}", MANIFEST, "v1")
    assert len(registry.lines("PUT *")) == 3


def test_put_manifest_that_is_refused_or_altered(registry: FakeRegistry):
    config = {"mediaType": "x", "digest": f"sha256:{'0' * 64}", "size": 1}
    with pytest.raises(NotInRegistryError, match="MANIFEST_BLOB_UNKNOWN"):
        there(registry).put_manifest(json.dumps({"config": config, "layers": []}).encode(), MANIFEST, "v1")
    with pytest.raises(RejectedError, match="MANIFEST_INVALID: not JSON"):
        there(registry).put_manifest(b"no", MANIFEST, "v1")
    registry.fail("PUT *", digest=f"sha256:{'0' * 64}")
    with pytest.raises(WrongAnswerError, match="made something else of it"):
        there(registry).put_manifest(b"{}", MANIFEST, "v1")


def test_tags_page_by_page(registry: FakeRegistry):
    names = [f"v{n:03}" for n in range(25)]
    for name in names:
        registry.add_manifest("team/app", b"{}", name)
    registry.page = 10
    assert list(there(registry).tags()) == names
    assert len(registry.lines("* */tags/list")) == 3
    registry.tags.clear()
    assert list(there(registry).tags()) == []


def test_tags_that_are_none(registry: FakeRegistry):
    registry.add_manifest("team/app", b"{}", "v1")
    registry.fail("* */tags/list", body=b'["v1"]')
    with pytest.raises(WrongAnswerError, match="list is not valid"):
        list(there(registry).tags())


@pytest.mark.parametrize("api", [True, False])
@pytest.mark.parametrize("page", [1000, 2])
def test_referrers(registry: FakeRegistry, page: int, *, api: bool):
    registry.referrers, registry.page = api, page
    subject, repository = registry.add_image("team/app", "v1", b"layer"), there(registry)
    assert repository.referrers(subject) == []
    put = {
        name: repository.put_manifest(data, MANIFEST, str(Digest.of(data)))
        for name in ("a", "b", "c", "d", "e")
        for data in [artifact(registry, subject, KIND if name < "d" else f"{KIND}+zip", annotations={"name": name})]
    }
    found = repository.referrers(subject)
    assert {d.annotations["name"]: d.digest for d in found} == put
    assert {d.annotations["name"] for d in repository.referrers(subject, KIND)} == {"a", "b", "c"}
    assert {d.annotations["name"] for d in repository.referrers(subject, f"{KIND}+zip")} == {"d", "e"}
    assert repository.referrers(subject, "other/type") == []
    assert (f"sha256-{subject.hex}" in registry.tags["team/app"]) is not api


def test_index_of_referrers_keeps_what_others_wrote(registry: FakeRegistry):
    registry.referrers = False
    subject = registry.add_image("team/app", "v1", b"layer")
    other = {
        "mediaType": MANIFEST, "digest": f"sha256:{'1' * 64}", "size": 5, "artifactType": "x/y", "urls": ["u"],
        "platform": {"os": "linux", "architecture": "amd64", "features": ["f"]},
    }  # fmt: skip
    document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [other]}
    registry.add_manifest("team/app", canonical_json(document), f"sha256-{subject.hex}", INDEX)
    registry.checks_manifests = False
    data = artifact(registry, subject)
    for _ in range(2):
        there(registry).put_manifest(data, MANIFEST, str(Digest.of(data)))
    _, index = registry.manifests["team/app"][registry.tags["team/app"][f"sha256-{subject.hex}"]]
    manifests = json.loads(index)["manifests"]
    assert other in manifests
    assert len(manifests) == 2


def test_index_of_referrers_that_another_client_replaces(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch):
    registry.referrers = False
    subject = registry.add_image("team/app", "v1", b"layer")
    add, tag = registry.add_manifest, f"sha256-{subject.hex}"
    lost: list[str] = []

    def add_and_lose(repository: str, data: bytes, name: str | None = None, media_type: str = MANIFEST) -> Digest:
        if name == tag and len(lost) < 2:
            lost.append(name)
            data = canonical_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": []})
        return add(repository, data, name, media_type)

    monkeypatch.setattr(registry, "add_manifest", add_and_lose)
    data = artifact(registry, subject)
    there(registry).put_manifest(data, MANIFEST, str(Digest.of(data)))
    assert [d.digest for d in there(registry).referrers(subject)] == [Digest.of(data)]


@pytest.mark.parametrize("body", [b"no", b"[]", b'{"manifests": [1]}', b'{"manifests": 5}'])
def test_referrers_that_are_none(registry: FakeRegistry, body: bytes):
    registry.fail("* */referrers/*", body=body)
    with pytest.raises(WrongAnswerError, match="index is not valid"):
        there(registry).referrers(Digest.of(b"x"))


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, status: int):
    waited: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", waited.append)
    registry.add_image("team/app", "v1", b"layer")
    registry.fail("GET *", status=status, retry_after="3", times=1)
    registry.fail("GET *", status=status, retry_after="86400", times=1)
    there(registry).manifest("v1")
    assert [seconds for seconds in waited if seconds] == [3, 60]


def test_what_is_not_temporary_is_asked_once(registry: FakeRegistry):
    registry.fail("GET *", status=400, code="NAME_INVALID", message="bad")
    with pytest.raises(RejectedError, match=r"rejects it \(status 400\): NAME_INVALID: bad"):
        there(registry).manifest("v1")
    assert len(registry.requests) == 1


def test_an_error_that_is_a_page(registry: FakeRegistry):
    registry.fail("GET *", status=502, times=4)
    registry.fail("GET *", body=b"<html>secret</html>", status=None)
    registry.fail("* /v2/", times=0)
    with pytest.raises(EnvbuilderError) as caught:
        there(registry).manifest("v1")
    assert "html" not in str(caught.value)


def test_signed_addresses_are_not_shown(registry: FakeRegistry, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "envbuilder")
    registry.redirects = True
    digest = registry.add_blob("team/app", b"layer")
    registry.fail("GET /objects/*", cut=0)
    with pytest.raises(RegistryUnreachableError) as caught:
        there(registry).blob(digest)
    shown = f"{caught.value} {caught.value.hint} {caplog.text}"
    assert registry.objects in shown
    assert "hush" not in shown


def test_redirect_in_circles(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch):
    def around(handler: Any, name: str, digest: str, _fault: Any) -> None:
        handler._send(307, b"", {"Location": f"/v2/{name}/blobs/{digest}"})

    monkeypatch.setattr("tests.registry.fakeserver.RegistryHandler._blobs", around)
    with pytest.raises(WrongAnswerError, match="redirects in circles"):
        there(registry).blob(Digest.of(b"x"))
    assert len(registry.requests) == 6


def test_connections_are_used_again(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    setup = "tests.registry.fakeserver.RegistryHandler.setup"
    from tests.registry.fakeserver import RegistryHandler  # noqa: PLC0415

    original = RegistryHandler.setup

    def counted(handler: RegistryHandler) -> None:
        made.append(1)
        original(handler)

    monkeypatch.setattr(setup, counted)
    digest, repository = registry.add_image("team/app", "v1", b"layer" * 100), there(registry)
    layer = Digest.of(b"layer" * 100)
    for _ in range(5):
        assert repository.resolve("v1")
        assert repository.manifest(str(digest))
        assert repository.has_blob(layer)
        assert repository.resolve("v2") is None
        with repository.read_blob(layer, 10, 20) as pieces:
            assert b"".join(pieces) == b"layer" * 2
    assert len(made) <= 2  # the question whether it speaks TLS, and one


def test_nothing_is_asked_before_it_is_needed():
    with fake_registry() as registry:
        there(registry)
        assert registry.requests == []
