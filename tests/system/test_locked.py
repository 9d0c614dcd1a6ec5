"""Locks of bases: written, read, told stale, and built from while the archive moves on."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest

from envbuilder.errors import InputError, UnreachableError
from envbuilder.spec.recipe import DebianBase, ImageBase, Layering, Paths, Recipe
from envbuilder.store.store import Store
from envbuilder.system.locked import WrongPackageError, lock_system, make_locked_system
from envbuilder.system.lockfile import (
    SystemLock,
    SystemLockMissingError,
    format_system_lock,
    moved,
    read_system_lock,
    system_drift,
    write_system_lock,
)
from envbuilder.tomlread import TomlError
from tests.system.debs import Deb, Thing, make_archive, make_host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BytesIO

    from envbuilder.oci.digest import Digest
    from envbuilder.spec.recipe import Base
    from envbuilder.system.apt import Host

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")

LIBC = Deb("libc6", "2.36-9+deb12u1~x", [Thing("usr/lib/libc.so.6", "c")])
TOOL = Deb("tool", "1:2.0-1", [Thing("usr/bin/tool", "t", 0o755)], {"Depends": "libc6"})
NEWER = replace(TOOL, version="1:2.0-2")
BASE = DebianBase(None, ("tool",))


def recipe_of(base: Base) -> Recipe:
    layering = Layering(1, 1, 60)
    paths = Paths("/opt/python", "/opt/env")
    return Recipe("small", Path("small.toml"), base, ("host",), paths, layering, "root", "/", {}, ())


class Refusing(SimpleHTTPRequestHandler):
    """Gives the lists, and refuses what they list: the one failure that apt does not wait for to pass."""

    def send_head(self) -> BytesIO | BinaryIO | None:
        if self.path.startswith("/pool/"):
            self.send_error(403)
            return None
        return super().send_head()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def refusing(folder: Path) -> Iterator[str]:
    """Serve a folder by HTTP and give its URL."""
    handler = partial(Refusing, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Place:
    """An archive, a lock that was made of it, and any number of machines that build from the lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.archive = folder / "archive"
        self.host: Host = make_host(folder, make_archive(self.archive, "duck", [LIBC, TOOL]))
        self.lock = self.make_lock()

    def make_lock(self) -> SystemLock:
        return lock_system(recipe_of(BASE), self.store("locker"), host=self.host)

    def store(self, name: str) -> Store:
        return Store(self.folder / name)

    def build(self, name: str = "builder") -> tuple[list[str], Digest]:
        """Build on a machine and return versions and digest of the layer."""
        plan, layer = make_locked_system(self.lock, BASE, self.store(name), renew="renew it", host=self.host)
        return [package.version for package in plan.packages], layer.digest


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


LOCKED = ["2.36-9+deb12u1~x", "1:2.0-1"]


def test_a_lock_is_the_same_bytes_and_names_no_host(place: Place):
    text = format_system_lock(place.lock)
    assert format_system_lock(place.make_lock()) == text
    file = place.folder / "small.duck.system.toml"
    write_system_lock(place.lock, file)
    assert file.read_text() == text
    assert read_system_lock(file) == place.lock
    assert "://" not in text
    assert str(place.folder) not in text
    assert text.endswith("\n")
    assert f'file = "pool/{LIBC.file}"' in text


def test_a_lock_that_is_wrong_names_file_and_place(tmp_path, place):
    file = tmp_path / "small.duck.system.toml"
    with pytest.raises(SystemLockMissingError, match="does not exist"):
        read_system_lock(file)
    text = format_system_lock(place.lock)
    for old, new, error in [
        ("schema = 1", "schema = 2", "schema: is 2; this envbuilder reads 1"),
        ('file = "pool/', 'file = "http://mirror.invalid/pool/', r"package\[0\].file: .* is not a path below the root"),
        ('file = "pool/', 'file = "../pool/', r"package\[0\].file: .* is not a path below the root"),
        ('sha256 = "', 'sha256 = "x', r"package\[0\].sha256"),
        ("size = ", "sizes = ", r"package\[0\].size: is missing"),
    ]:
        file.write_text(text.replace(old, new))
        with pytest.raises(TomlError, match=error):
            read_system_lock(file)


def test_drift_names_what_is_asked_for_now(place):
    assert system_drift(place.lock, BASE) == ()
    assert system_drift(place.lock, DebianBase("duck", ("tool", "tool"))) == ()
    changed = system_drift(place.lock, DebianBase(None, ("libc6",)))
    assert [str(difference) for difference in changed] == ["base.debian: - tool", "base.debian: + libc6"]


def test_the_locked_packages_are_built_and_nothing_is_asked_the_second_time(place):
    versions, digest = place.build()
    assert versions == LOCKED
    shutil.rmtree(place.archive)
    begin = time.perf_counter()
    assert place.build() == (versions, digest)
    assert time.perf_counter() - begin < 0.05


def test_an_archive_that_moved_on_changes_nothing_as_long_as_the_old_files_lie_there(place, caplog):
    before = place.build()
    make_archive(place.archive, "duck", [LIBC, NEWER])
    TOOL.write(place.archive / "pool")
    with caplog.at_level(logging.WARNING):
        assert place.build("later") == before
    assert not caplog.records
    place.lock = place.make_lock()
    assert place.build("later")[0] == [LOCKED[0], "1:2.0-2"]


def test_a_file_that_another_archive_of_the_release_still_has_is_taken(place, tmp_path):
    before = place.build()
    sources = make_archive(place.archive, "duck", [LIBC, NEWER])
    sources += make_archive(tmp_path / "security", "duck-security", [NEWER])
    place.host = make_host(tmp_path, sources.replace("copy:", "file:"))
    TOOL.write(tmp_path / "security" / "pool")
    assert place.build("later") == before
    assert not any(path.is_symlink() for path in (tmp_path / "later" / "blobs" / "sha256").iterdir())


def test_packages_that_are_gone_are_resolved_anew_with_a_warning(place, caplog):
    before = place.build()
    make_archive(place.archive, "duck", [LIBC, NEWER])
    with caplog.at_level(logging.WARNING):
        versions, digest = place.build("later")
    assert versions == [LOCKED[0], "1:2.0-2"]
    assert digest != before[1]
    (record,) = caplog.records
    assert record.getMessage() == (
        "the mirror has 1 of 2 locked packages of duck no longer, so the base was resolved anew; 1 moved on "
        "(tool: 1:2.0-1 -> 1:2.0-2), and the image's digest differs from that of other builds of this lock; "
        "`renew it` renews the lock"
    )
    # What is gone is not asked for again, and told again.
    begin = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        assert place.build("later") == (versions, digest)
    assert time.perf_counter() - begin < 0.05
    assert len(caplog.records) == 2


def test_other_bytes_are_an_error_whether_the_lists_know_of_them_or_not(place):
    same = replace(TOOL, things=[Thing("usr/bin/tool", "T", 0o755)])
    make_archive(place.archive, "duck", [LIBC, same])
    with pytest.raises(WrongPackageError, match=r"pool/tool_.* has sha256:\w+ instead of the locked sha256:\w+"):
        place.build("rebuilt")
    make_archive(place.archive, "duck", [LIBC, TOOL])
    (place.archive / "pool" / TOOL.file).write_bytes(same.data)
    with pytest.raises(WrongPackageError):
        place.build("damaged")
    longer = replace(same, things=[Thing("usr/bin/tool", "T" * 9999, 0o755)])
    (place.archive / "pool" / TOOL.file).write_bytes(longer.data)
    with pytest.raises(WrongPackageError, match=f"instead of the locked {len(TOOL.data)} bytes"):
        place.build("longer")
    for name in ("rebuilt", "damaged", "longer"):
        assert not place.store(name).has(place.lock.plan.packages[1].digest)
        assert not list((place.folder / name / "partial").iterdir())


def test_a_mirror_out_of_reach_is_not_taken_for_packages_that_are_gone(place, tmp_path):
    store = place.store("later")
    store.put(LIBC.data)  # what is missing is the one package that the lists have no longer
    source = make_archive(place.archive, "duck", [LIBC, NEWER])
    with refusing(place.archive) as url:
        place.host = make_host(tmp_path, source.replace(f"copy:{place.archive}", url))
        with pytest.raises(UnreachableError, match="1 of 2 locked packages of `duck` could not be fetched"):
            place.build("later")


def test_what_moved_on(place):
    was = place.lock.plan
    make_archive(place.archive, "duck", [Deb("new"), replace(NEWER, fields={"Depends": "new"})])
    now = place.make_lock().plan
    changes = [str(change) for change in moved(was, now)]
    assert changes == ["libc6: - 2.36-9+deb12u1~x", "new: + 1.0-1", "tool: 1:2.0-1 -> 1:2.0-2"]


def test_only_packages_have_such_a_lock(tmp_path):
    with pytest.raises(InputError, match="only a base of Debian packages"):
        lock_system(recipe_of(ImageBase("x")), Store(tmp_path / "store"))
