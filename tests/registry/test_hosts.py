from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from envbuilder.registry import hosts
from envbuilder.registry.client import open_repository
from envbuilder.registry.errors import RegistryUnreachableError
from envbuilder.registry.hosts import BlockedError, Place, Places, find_places, is_loopback
from envbuilder.registry.reference import Reference
from envbuilder.tomlread import TomlError
from tests.registries import fake_registry

if TYPE_CHECKING:
    from pathlib import Path

    from tests.registries import FakeRegistry

BLOB = bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def no_system_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "_SYSTEM", tmp_path / "etc")


def configure(configuration: Path, text: str, name: str = "registries.conf") -> Path:
    file = configuration / "containers" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def places(text: str) -> Places:
    return find_places(Reference.parse(text))


def test_without_configuration():
    assert places("registry.test:5000/team/app") == Places(Place("registry.test:5000", "team/app"))
    assert places("python") == Places(Place("registry-1.docker.io", "library/python"))


def test_location_prefix_and_mirrors(configuration: Path):
    configure(
        configuration,
        """
        unqualified-search-registries = ["docker.io"]
        short-name-mode = "enforcing"

        [[registry]]
        location = "registry.test"
        insecure = true

        [[registry]]
        prefix = "registry.test/team"
        location = "inner.test:5000/moved"

        [[registry.mirror]]
        location = "mirror.test/cache"
        insecure = true
        pull-from-mirror = "digest-only"

        [[registry.mirror]]
        location = "docker.io/team"
        pull-from-mirror = "tag-only"
    """,
    )
    assert places("registry.test/other/app") == Places(Place("registry.test", "other/app", insecure=True))
    assert places("registry.test/teams/app").mirrors == ()
    assert places("registry.test/team/app:v1") == Places(
        Place("inner.test:5000", "moved/app"),
        (
            Place("mirror.test", "cache/app", insecure=True, digests=True, tags=False),
            Place("registry-1.docker.io", "team/app", digests=False, tags=True),
        ),
    )


def test_wildcards(configuration: Path):
    configure(
        configuration,
        """
        [[registry]]
        prefix = "*.old.test"
        location = "new.test/archive"
        [[registry]]
        prefix = "*.plain.test"
        insecure = true
    """,
    )
    assert places("a.old.test/app").origin == Place("new.test", "archive/app")
    assert places("old.test/app").origin == Place("old.test", "app")
    assert places("a.plain.test/app").origin == Place("a.plain.test", "app", insecure=True)


def test_mirror_by_digest_only(configuration: Path):
    configure(
        configuration,
        """
        [[registry]]
        location = "registry.test"
        mirror-by-digest-only = true
        mirror = [{ location = "mirror.test" }]
    """,
    )
    assert [(m.digests, m.tags) for m in places("registry.test/app").mirrors] == [(True, False)]


def test_blocked(configuration: Path):
    file = configure(configuration, '[[registry]]\nlocation = "registry.test"\nblocked = true\n')
    with pytest.raises(BlockedError, match=str(file)) as caught:
        open_repository(Reference.parse("registry.test/app"))
    assert caught.value.exit_code == 2


def test_files_and_their_order(configuration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def registry(location: str) -> str:
        return f'[[registry]]\nprefix = "registry.test"\nlocation = "{location}"\n'

    def host() -> str:
        return places("registry.test/app").origin.host

    system = tmp_path / "etc"
    (system / "registries.conf.d").mkdir(parents=True)
    (system / "registries.conf").write_text(registry("system.test"))
    assert host() == "system.test"
    configure(configuration, registry("user.test"))
    assert host() == "user.test"
    explicit = tmp_path / "explicit.conf"
    explicit.write_text(registry("explicit.test"))
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(explicit))
    assert host() == "explicit.test"
    (system / "registries.conf.d" / "50-a.conf").write_text(registry("folder.test"))
    assert host() == "folder.test"
    configure(configuration, registry("user-folder.test"), "registries.conf.d/10-b.conf")
    assert host() == "user-folder.test"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[registry]]\nlocation = 1\n", r"registry\[0\]\.location: must be a string"),
        ("[[registry]]\ninsecure = true\n", r"registry\[0\]\.location: is missing"),
        (
            '[[registry]]\nlocation = "a.test"\n[[registry.mirror]]\n',
            r"registry\[0\]\.mirror\[0\]\.location: is missing",
        ),
        (
            '[[registry]]\nlocation = "a.test"\nmirror = [{location = "b.test", pull-from-mirror = "x"}]\n',
            r"pull-from-mirror: must be one of all, digest-only, tag-only, not `x`",
        ),
        ("[registries.search]\nregistries = []\n", "old version 1"),
        ("[[registry", "is not valid TOML"),
    ],
)
def test_files_that_are_not_valid(configuration: Path, text: str, reason: str):
    configure(configuration, text)
    with pytest.raises(TomlError, match=reason):
        places("registry.test/app")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("localhost:5000", True), ("a.localhost", True), ("127.0.0.1:5000", True),
        ("127.1.2.3", True), ("[::1]:5000", True), ("[::1]", True),
        ("127.0.0.1.test", False), ("localhost.test:5000", False), ("10.0.0.1:5000", False), ("[2001:db8::1]", False),
    ],
)  # fmt: skip
def test_loopback(host: str, *, expected: bool):
    assert is_loopback(host) is expected


def with_mirror(configuration: Path, origin: FakeRegistry, mirror: FakeRegistry) -> Reference:
    configure(
        configuration,
        f"""
        [[registry]]
        location = "{origin.address}"
        [[registry.mirror]]
        location = "{mirror.address}/cache"
    """,
    )
    return Reference.parse(origin.reference("team/app"))


def test_mirror_has_it(registry: FakeRegistry, configuration: Path):
    with fake_registry() as mirror:
        reference = with_mirror(configuration, registry, mirror)
        digest = mirror.add_image("cache/team/app", "v1", BLOB)
        there = open_repository(reference)
        descriptor = there.resolve("v1")
        assert descriptor is not None
        assert descriptor.digest == digest
        assert there.manifest(str(digest)).descriptor == descriptor
    assert registry.requests == []


def test_mirror_lacks_it_or_has_other_bytes(registry: FakeRegistry, configuration: Path):
    with fake_registry() as mirror:
        there = open_repository(with_mirror(configuration, registry, mirror))
        digest, layer = registry.add_image("team/app", "v1", BLOB), registry.add_blob("team/app", BLOB)
        assert there.manifest("v1").descriptor.digest == digest
        assert mirror.lines() != []
        mirror.add_blob("cache/team/app", BLOB)
        mirror.damage("cache/team/app", layer)
        assert there.blob(layer) == BLOB
        assert f"GET /v2/cache/team/app/blobs/{layer}" in mirror.lines()


def test_mirror_breaks_off_for_good(registry: FakeRegistry, configuration: Path):
    with fake_registry() as mirror:
        there = open_repository(with_mirror(configuration, registry, mirror))
        for one, repository in ((registry, "team/app"), (mirror, "cache/team/app")):
            digest = one.add_blob(repository, BLOB)
        mirror.fail("GET */blobs/*", cut=70_000, times=1)
        mirror.fail("GET */blobs/*", cut=0)
        with there.read_blob(digest) as pieces:
            assert b"".join(pieces) == BLOB
        assert registry.requests[-1].headers["range"] == "bytes=70000-"
        asked = len(mirror.requests)
        assert there.blob(digest) == BLOB
        assert len(mirror.requests) == asked  # it is left out from then on


def test_mirror_is_down_and_never_written_to(registry: FakeRegistry, configuration: Path):
    with fake_registry() as mirror:
        reference = with_mirror(configuration, registry, mirror)
    digest = registry.add_image("team/app", "v1", BLOB)
    assert open_repository(reference).manifest("v1").descriptor.digest == digest
    there = open_repository(reference, push=True)
    assert there.has_blob(registry.add_blob("team/app", BLOB))
    assert there.resolve("v1") is not None


def test_error_is_that_of_the_registry_itself(registry: FakeRegistry, configuration: Path):
    with fake_registry() as mirror:
        there = open_repository(with_mirror(configuration, registry, mirror))
        registry.fail("*", status=503, code="UNAVAILABLE")
        with pytest.raises(RegistryUnreachableError, match="503: UNAVAILABLE"):
            there.manifest("v1")
