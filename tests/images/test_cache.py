"""Building from a registry's cache: nothing else is needed, and nothing wrong gets into an image unnoticed."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import pytest

from envbuilder.images.build import compression_of, stages_of
from envbuilder.images.cachedbuild import Built, Means, Wanted, build_cached, build_here
from envbuilder.images.cacheentry import Entry, NotAnEntryError, Question, layer_entry
from envbuilder.images.cachekeys import group_question, wheel_files
from envbuilder.images.extras import find_extra
from envbuilder.images.fromcache import UnvouchedBuildError
from envbuilder.images.layerrecord import LayerRecord, Recorded, format_record, read_record, write_record
from envbuilder.images.remotecache import PoisonedCacheError, RemoteCache, offer, publish, read_entry
from envbuilder.launch.engines import engine
from envbuilder.launch.job import Job
from envbuilder.lock.model import Build, Package
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import File, write_layer
from envbuilder.oci.model import MANIFEST, TOC_DIGEST
from envbuilder.registry.client import Repository, open_repository
from envbuilder.registry.reference import Reference
from envbuilder.store.partial import WrongBytesError
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from envbuilder.system.locked import lock_system
from envbuilder.system.pythons import find_interpreter
from envbuilder.tomlread import TomlError
from envbuilder.wheels.built import BuiltWheel, build_key, find_tools, remember
from envbuilder.wheels.key import InstallPrefix
from envbuilder.wheels.supply import LockedWheels
from tests.images.test_build import MINOR, Machine, machine  # noqa: F401 (a fixture)
from tests.registries import FakeRegistry, fake_registry, quick_retries
from tests.wheelmaker import make_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEWEST = "2025-12-01T00:00:00Z"
TAG = f"cp{MINOR.replace('.', '')}"
#: What building the package ``compiled`` gives; its archive exists by name only, so that nobody can build it.
COMPILED = make_wheel("compiled", files={"compiled.py": "speed = 9\n"}, tag=f"{TAG}-{TAG}-linux_x86_64")
ARCHIVE = Package("compiled", "1.0", "compiled-1.0.tar.gz", Digest.of(b"archive"), 7, (), build=Build(()))


@dataclass(frozen=True)
class First:
    """The machine that built all by itself, what it says of that, and the registry that it told."""

    machine: Machine
    wanted: Wanted
    built: Built
    store: Store
    rows: list[Recorded]
    registry: FakeRegistry

    def repository(self, name: str = "cache") -> Repository:
        return open_repository(Reference.parse(f"{self.registry.address}/{name}"), push=True)

    def cache(self, name: str = "cache", *, trust: bool = False, without: str = "nothing") -> RemoteCache:
        """Return a cache that is held against the record; without the rows whose title or kind begins so."""
        rows = [row for row in self.rows if not row.title.startswith(without) and row.entry.kind != without]
        return RemoteCache([self.repository(name)], LayerRecord("small", tuple(rows)), trust=trust)

    def row(self, title: str) -> Recorded:
        return next(row for row in self.rows if row.title.startswith(title))

    def digest(self, title: str) -> Digest:
        blob = self.row(title).entry.blob
        assert blob is not None
        return blob.digest


#: Makes the manifest of a wrong answer: of the right entry, and the repository that blobs may be put into.
Poison: TypeAlias = Callable[[First, Entry, Repository], bytes]


@pytest.fixture(scope="module")
def first(machine: Machine) -> Iterator[First]:  # noqa: F811
    with fake_registry() as registry:
        store = machine.store("first")
        packages = sorted([*machine.source.lock.packages, ARCHIVE], key=lambda package: package.name)
        lock = replace(machine.source.lock, packages=tuple(packages))
        system = lock_system(machine.source.recipe, store, host=machine.host)
        wanted = Wanted(replace(machine.source, lock=lock, system=system), ())
        build_compiled(store)
        built = build_here(wanted, means_of(machine, store))
        rows = built.rows(store)
        made = First(machine, wanted, built, store, rows, registry)
        assert publish(rows, made.repository(), store) == len(rows)
        assert publish(rows, made.repository(), store) == 0
        yield made


def build_compiled(store: Store) -> None:
    """Let a store know the wheel that building ``compiled`` on this machine gives."""
    key = build_key(ARCHIVE, NEWEST, find_tools(find_interpreter(MINOR, ("host",), store).executable))
    remember(store, key, BuiltWheel(COMPILED.file, store.put(COMPILED.data), COMPILED.size))


def means_of(machine: Machine, store: Store) -> Means:  # noqa: F811
    def supply(python: Path) -> LockedWheels:
        return LockedWheels(store, machine.indexes, python, machine.source.environment, NEWEST)

    return Means(store, supply, machine.indexes, machine.host)


def nothing(store: Store) -> Means:
    """Return the means of a machine that has a store and reaches a registry, and nothing else."""

    def fail(*_: object) -> NoReturn:
        pytest.fail("only the cache is to be asked")

    return Means(store, fail, fail)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have no interpreter, no apt, no program at all."""
    for name in ("ENVBUILDER_PYTHON", "PATH", "PYENV_ROOT"):
        monkeypatch.setenv(name, "/nonexistent")


@pytest.mark.usefixtures("bare")
def test_a_fresh_machine_needs_nothing_but_the_cache(first: First, tmp_path: Path):
    asked = len(first.machine.index.requests)
    store = Store(tmp_path / "store")
    built = build_cached(first.wanted, nothing(store), first.cache())
    assert built.image == first.built.image
    assert len(first.machine.index.requests) == asked
    store.put_image(built.image, "small")
    assert not store.has(COMPILED.digest), "layers are fetched instead of wheels"
    assert [row.entry.tag for row in built.rows(store)] == [row.entry.tag for row in first.rows]


def test_an_image_from_the_cache_runs(first: First, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    store = Store(tmp_path / "store")
    image = build_cached(first.wanted, nothing(store), first.cache()).image
    words = ("python", "-c", "import compiled, lib; print(compiled.speed, lib.answer)")
    job = Job("small", words, first.machine.folder, {})
    assert engine("sandbox").run(job, image.config, str(root_tree(store, image))) == 0
    assert capfd.readouterr().out == "9 42\n"


@pytest.mark.usefixtures("bare")
def test_to_push_no_layer_is_fetched(first: First, tmp_path: Path):
    store = Store(tmp_path / "store")
    built = build_cached(first.wanted, nothing(store), first.cache(), fetch=False)
    assert built.image == first.built.image
    target = first.repository("images/small")
    offer(built.hits, target, store)
    *layers, metadata = built.image.manifest.layers
    assert not [layer for layer in layers if store.has(layer.digest)]
    assert all(target.has_blob(layer.digest) for layer in layers)
    assert store.has(metadata.digest), "it is made here"


def test_what_the_cache_lacks_is_made_here_and_the_image_is_the_same(first: First, tmp_path: Path):
    rows = [row for row in first.rows if not row.title.startswith("bucket 1")]
    publish(rows, first.repository("partial"), first.store, first.repository())
    first.machine.index.requests.clear()
    store = Store(tmp_path / "store")
    built = build_cached(first.wanted, means_of(first.machine, store), first.cache("partial"))
    assert built.image == first.built.image
    groups = [group for stage in stages_of(first.wanted.source) for group in stage.groups]
    (bucket,) = (group for group in groups if group.title.startswith("bucket 1"))
    assert [package.name for package in bucket.packages] == ["compiled", "torch"]
    (asked,) = first.machine.index.paths("*.whl")
    assert asked.rpartition("/")[2].startswith("torch-"), "the wheel that was built comes from the cache"
    assert {row.entry.tag for row in built.rows(store)} == {row.entry.tag for row in first.rows}


def test_extras_come_from_the_cache_too(first: First, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fast = make_wheel("fast", "2.8.3+cu12torch2.7", tag=f"{TAG}-{TAG}-linux_x86_64")
    first.machine.index.add(make_wheel("helper"))
    monkeypatch.setenv("ENVBUILDER_EXTRA_FAST_URL", f"file://{fast.write(tmp_path / 'elsewhere')}")
    wanted = replace(first.wanted, extras=(find_extra(first.wanted.source.environment, "fast"),))
    built = build_here(wanted, means_of(first.machine, first.store))
    rows = built.rows(first.store)
    assert [row.title for row in rows if row not in first.rows] == ["extra fast", "extra fast"], "its layer, its files"
    publish(rows, first.repository("extras"), first.store, first.repository())
    first.machine.index.requests.clear()
    cache = RemoteCache([first.repository("extras")], LayerRecord("small", tuple(rows)))
    cached = build_cached(wanted, nothing(Store(tmp_path / "store")), cache)
    assert cached.image == built.image
    assert cached.source.name == "small+fast"
    assert not first.machine.index.requests


def test_without_a_record_nothing_is_asked(first: First):
    questions = [Question("layer", row.entry.key, row.title) for row in first.rows]
    asked = len(first.registry.requests)
    assert RemoteCache([first.repository()], None).find(questions) == [None] * len(questions)
    assert len(first.registry.requests) == asked


# -- poison -------------------------------------------------------------------------------------------------------


def another_layer(first: First, entry: Entry, _: Repository) -> bytes:
    """Answer with a layer that is valid, and in the cache, but another one."""
    other = first.row("bucket 2").entry
    return replace(entry, blob=other.blob, facts=other.facts).to_bytes()


def altered_layer(_: First, entry: Entry, repository: Repository) -> bytes:
    """Answer with a layer that somebody altered, and describe it truthfully."""
    out = io.BytesIO()
    layer = write_layer([File("opt/env/lib/evil.py", Bytes(b"import os"))], out)
    repository.put_blob(layer.digest, layer.size, lambda: io.BytesIO(out.getvalue()), lambda _: None)
    return replace(layer_entry(Question(entry.kind, "", ""), layer), key=entry.key).to_bytes()


def wrong_diff_id(_: First, entry: Entry, __: Repository) -> bytes:
    """Answer with the right layer, and the wrong digest of what it unpacks to."""
    return replace(entry, facts={**entry.facts, "diff-id": str(Digest.of(b"wrong"))}).to_bytes()


def wrong_size(_: First, entry: Entry, __: Repository) -> bytes:
    """Answer with the right layer, and the wrong size."""
    assert entry.blob is not None
    return replace(entry, blob=replace(entry.blob, size=entry.blob.size + 1)).to_bytes()


def wrong_annotation(_: First, entry: Entry, __: Repository) -> bytes:
    """Answer with the right layer, and the digest of another table of contents, which lazy pullers would believe."""
    assert entry.blob is not None
    return replace(entry, blob=replace(entry.blob, annotations={TOC_DIGEST: str(Digest.of(b"wrong"))})).to_bytes()


def entry_of_another_key(first: First, _: Entry, __: Repository) -> bytes:
    """Answer with an entry that is right, under the tag of another key."""
    return first.row("bucket 2").entry.to_bytes()


def an_image(first: First, _: Entry, repository: Repository) -> bytes:
    """Answer with something else than an entry."""
    documents = first.built.image.documents
    repository.put_blob(
        Digest.of(documents.config), len(documents.config), lambda: io.BytesIO(documents.config), lambda _: None
    )
    for layer in first.built.image.manifest.layers:
        if not repository.has_blob(layer.digest):
            data = first.store.read(layer.digest)
            repository.put_blob(layer.digest, layer.size, lambda: io.BytesIO(data), lambda _: None)  # noqa: B023
    return documents.manifest


POISON = {
    another_layer: "digest sha256:[0-9a-f]{64} instead of sha256:[0-9a-f]{64}",
    altered_layer: "digest sha256:[0-9a-f]{64} instead of sha256:[0-9a-f]{64}",
    wrong_diff_id: f"it has diff-id {Digest.of(b'wrong')} instead of sha256:",
    wrong_size: r"it has size \d+ instead of \d+$",
    wrong_annotation: rf"it has containerd\S+ {Digest.of(b'wrong')} instead of sha256:",
    entry_of_another_key: "it has the entry of another key, layer-[0-9a-f]{64}$",
    an_image: "it has not an entry of a cache",
}


def bucket_question(first: First) -> Question:
    """Return the question that ``bucket 1`` answers."""
    source = first.wanted.source
    groups = [group for stage in stages_of(source) for group in stage.groups]
    (group,) = (group for group in groups if group.title.startswith("bucket 1"))
    files = wheel_files(group.packages, {"compiled": BuiltWheel(COMPILED.file, COMPILED.digest, 0)}, first.store.root)
    version = first.row("Python").entry.facts["compiler"]
    return group_question(group, files, InstallPrefix("/opt/env", MINOR), version, compression_of(source))


def poisoned(first: First, poison: Poison, name: str) -> Recorded:
    """Put a wrong answer into a copy of the cache; return the row that it is about."""
    row, repository = first.row("bucket 1"), first.repository(name)
    publish(first.rows, repository, first.store, first.repository())
    repository.put_manifest(poison(first, row.entry, repository), MANIFEST, row.entry.tag)
    return row


@pytest.mark.parametrize("poison", POISON, ids=lambda poison: poison.__name__)
def test_a_poisoned_entry_is_refused(first: First, poison: Poison, tmp_path: Path):
    name = f"poison/{poison.__name__}"
    row = poisoned(first, poison, name)
    store = Store(tmp_path / "store")
    for trust in (False, True):
        with pytest.raises(PoisonedCacheError, match=POISON[poison]) as caught:
            build_cached(first.wanted, nothing(store), first.cache(name, trust=trust))
        assert caught.value.exit_code == 1
        assert f"{name} is wrong about {row.title} (tag {row.entry.tag})" in caught.value.message
        assert "build without --cache" in str(caught.value.hint)
    assert store.find_image("small") is None
    # A trusted machine that fills this cache notices it as well.
    with pytest.raises(PoisonedCacheError, match="bucket 1"):
        publish(first.rows, first.repository(name), first.store)


@pytest.mark.parametrize("poison", [entry_of_another_key, an_image])
def test_trust_does_not_extend_to_what_cannot_be_right(first: First, poison: Poison, tmp_path: Path):
    name = f"trusted/{poison.__name__}"
    poisoned(first, poison, name)
    with pytest.raises(PoisonedCacheError, match=POISON[poison]):
        build_cached(first.wanted, nothing(Store(tmp_path)), first.cache(name, trust=True, without="bucket 1"))


def test_what_nothing_vouches_for_is_taken_only_on_trust_and_never_passed_on(
    first: First, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    poisoned(first, another_layer, "untrue")
    store = Store(tmp_path / "store")
    (none,) = first.cache("untrue", without="bucket 1").find([bucket_question(first)])
    assert none is None
    built = build_cached(first.wanted, nothing(store), first.cache("untrue", trust=True, without="bucket 1"))
    assert built.image.digest != first.built.image.digest
    # What came so is in the store now. A later build finds it there, but may neither record nor publish it.
    again = build_cached(first.wanted, nothing(store), first.cache("untrue", without="bucket 1"))
    assert again.image == built.image
    with pytest.raises(UnvouchedBuildError, match="taken from a cache with --trust-cache: bucket 1"):
        again.rows(store)
    # A record that knows better is believed rather than the store.
    with caplog.at_level(logging.WARNING):
        assert build_cached(first.wanted, nothing(store), first.cache()).image == first.built.image
    assert "the store is at odds with the record about bucket 1" in caplog.text


def test_another_interpreter_in_the_cache_is_not_taken_for_the_recorded_one(first: First, tmp_path: Path):
    row = first.row("Python")
    other = replace(row.entry, facts={**row.entry.facts, "version": f"{MINOR}.99"})
    repository = first.repository("pythons")
    publish([*first.rows, Recorded(row.title, other)], repository, first.store, first.repository())
    assert read_entry(repository, row.entry.question_tag) == other, "the last one is what who trusts the cache gets"
    store = Store(tmp_path / "store")
    assert build_cached(first.wanted, nothing(store), first.cache("pythons")).image == first.built.image


def test_a_registry_that_gives_other_bytes_is_found_out(first: First, tmp_path: Path):
    digest = first.digest("bucket 1")
    publish(first.rows, first.repository("altered"), first.store, first.repository())
    first.registry.damage("altered", digest)
    store = Store(tmp_path / "store")
    with pytest.raises(WrongBytesError, match=str(digest)):
        build_cached(first.wanted, nothing(store), first.cache("altered"))
    assert not store.has(digest)


def test_a_cache_that_lost_a_layer_is_told_and_the_layer_made_here(
    first: First, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    publish(first.rows, first.repository("lossy"), first.store, first.repository())
    del first.registry.blobs["lossy"][str(first.digest("bucket 1"))]
    store = Store(tmp_path / "store")
    with caplog.at_level(logging.WARNING):
        built = build_cached(first.wanted, means_of(first.machine, store), first.cache("lossy"))
    assert built.image == first.built.image
    assert "but not the blob itself" in caplog.text


def test_a_cache_out_of_reach_stops_no_build(
    first: First, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    quick_retries(monkeypatch)
    store = Store(tmp_path / "store")
    nowhere = open_repository(Reference.parse("127.0.0.1:9/cache"))
    record = LayerRecord("small", tuple(first.rows))
    with caplog.at_level(logging.WARNING):
        built = build_cached(first.wanted, nothing(store), RemoteCache([nowhere, first.repository()], record))
    assert built.image == first.built.image
    assert caplog.text.count("127.0.0.1:9/cache is left out") == 1


# -- the small parts ----------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(first: First, tmp_path: Path):
    record = LayerRecord("small", tuple(first.rows))
    write_record(record, tmp_path / "small.layers.toml")
    assert read_record(tmp_path / "small.layers.toml") == record
    text = format_record(record)
    assert text.endswith('"\n')
    assert str(first.machine.folder) not in text


def test_the_wrong_word_in_a_record_is_named(tmp_path: Path):
    file = tmp_path / "small.layers.toml"
    file.write_text(
        'schema = 1\nenvironment = "small"\n[[entry]]\ntitle = "x"\nkind = "layer"\nkey = "k"\ndigest = "md5:1"\n'
    )
    with pytest.raises(TomlError, match=r"entry\[0\]\.digest: not a sha256 digest"):
        read_record(file)
    file.write_text("schema = 2\n")
    with pytest.raises(TomlError, match="schema: is 2; this envbuilder reads 1"):
        read_record(file)


def test_an_entry_is_the_same_bytes_and_nothing_more(first: First):
    for row in first.rows:
        data = row.entry.to_bytes()
        assert Entry.from_bytes(data) == row.entry
        with pytest.raises(NotAnEntryError):
            Entry.from_bytes(data.replace(b'"schemaVersion":2', b'"schemaVersion":2,"subject":null'))
    for data in (b"", b"[]", b'{"layers":[{}],"annotations":{}}', b"[" * 100_000):
        with pytest.raises(NotAnEntryError):
            Entry.from_bytes(data)


def test_tags_are_what_registries_take(first: First):
    assert all(re.fullmatch(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}", row.entry.tag) for row in first.rows)
    assert {row.entry.kind for row in first.rows} == {"python", "layer", "wheel"}
