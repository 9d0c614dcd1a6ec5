"""What a collection takes and what it leaves: worthless things, eviction to a budget, pins, leases, clocks."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from envbuilder.errors import InputError
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import File
from envbuilder.store.gc import Collected, Plan, Reason, carry_out, make_plan
from envbuilder.store.overview import image_entries
from envbuilder.store.pins import pin, pinned, read_pins, unpin
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store, StoreDamagedError
from envbuilder.store.usage import usage
from tests.smallimage import put_image, put_layer

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.oci.model import Image

DAY = 24 * 3600


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "s")


def image_of(store: Store, name: str, *texts: str, size: int = 20_000) -> Image:
    entries = ([File(f"f/{text}", Bytes(text.encode() + os.urandom(size)))] for text in texts)
    return put_image(store, name, [put_layer(store, entry) for entry in entries])


def age(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAY,) * 2)


def collect(store: Store, budget: int | None = None, *, images: bool = False, young: float = 0) -> Collected:
    """Let go of what the test relied on, and collect as another process would."""
    store.close()
    other = Store(store.root)
    plan = make_plan(other, budget, images=images, young=young)
    done = carry_out(other, plan)
    assert (done.images, done.removed) == (plan.images, plan.doomed), "a dry run says what is done"
    other.close()
    assert list((store.root / "trash").iterdir()) == []
    return done


def names(done: Collected | Plan) -> set[str]:
    entries = done.removed if isinstance(done, Collected) else done.doomed
    return {entry.path.name for entry in entries}


def reasons(done: Collected) -> dict[Reason, int]:
    return {reason: n for reason in Reason if (n := sum(entry.reason is reason for entry in done.removed))}


def test_without_a_budget_only_what_is_worthless_goes(store: Store):
    image = image_of(store, "env", "a", "b")
    root_tree(store, image)
    wheel = store.put(b"PK\x03\x04 a wheel")
    store.remember("layer", "good", {"digest": str(wheel)})
    store.remember("layer", "gone", {"digest": str(Digest.of(b"gone"))})
    store.remember("system-plan", "day", {"time": 1})
    (store.root / "known" / "layer" / "broken.json").write_text("{half")
    old, young, future = (store.partial(Digest.of(text)) for text in (b"old", b"young", b"future"))
    for path, days in ((old, 8), (young, 6), (future, -400)):
        path.write_bytes(b"part")
        age(path, days)
    for folder in ("partial", "trees", "roots", "blobs/sha256", "known/layer", "."):
        (store.root / folder / ".tmp-dead").mkdir()
        (store.root / folder / ".tmp-dead" / "file").write_text("x")
    (store.root / "trash").mkdir()
    (store.root / "trash" / "left").write_text("x")
    (store.root / "something of a later version").write_text("x")
    done = collect(store)
    assert reasons(done) == {
        Reason.TEMPORARY: 6,
        Reason.TRASH: 1,
        Reason.PARTIAL: 1,
        Reason.BROKEN: 2,
        Reason.LOCK: 3,
    }, done
    assert not old.exists()
    assert young.exists()
    assert future.exists()
    assert (store.root / "something of a later version").exists()
    assert store.has(wheel)
    assert store.recall("layer", "good") is not None
    assert store.recall("system-plan", "day") is not None
    assert root_tree(store, image).exists()
    assert reasons(collect(store)) == {}


def test_what_is_temporary_may_be_of_another_process(store: Store):
    with Store(store.root).writer() as blob:
        blob.file.write(b"under way")
        (path,) = (store.root / "partial").iterdir()
        assert collect(store).removed == ()
        age(path, 3)
        assert names(collect(store)) == {path.name}  # a process that writes for two days is dead, or on another host


def test_trees_and_roots_of_images_that_are_gone(store: Store):
    gone, stays = image_of(store, "gone", "a", "b"), image_of(store, "stays", "c")
    for image in (gone, stays):
        root_tree(store, image)
    assert store.drop_image("gone")
    assert not store.drop_image("gone")
    done = collect(store)
    assert reasons(done)[Reason.ORPHAN] == 3
    assert {entry.kind for entry in done.removed if entry.reason is Reason.ORPHAN} == {"tree", "root"}
    assert all(store.has(layer.digest) for layer in gone.manifest.layers)
    assert root_tree(store, stays).exists()
    store.put_image(gone, "gone")
    assert root_tree(store, gone).exists()


def test_the_least_recently_used_goes_first(store: Store):
    image_of(store, "env", "a")
    blobs = [store.put(b"PK\x03\x04" + os.urandom(40_000)) for _ in range(5)]
    for days, blob in enumerate(blobs, start=1):
        age(store.blob(blob), days)
    store.close()
    excess = usage(store).total - 90_000
    done = collect(store, excess)
    assert names(done) >= {blob.hex for blob in blobs[-3:]}
    assert [store.blob(blob).exists() for blob in blobs] == [True, True, False, False, False]
    assert done.left <= excess
    assert done.left == pytest.approx(usage(store).total, abs=30_000)  # the folders of locks and leases
    assert store.has(blobs[1])  # that counts as used
    age(store.blob(blobs[0]), 1)
    assert names(collect(store, usage(store).total - 1000)) & {blob.hex for blob in blobs} == {blobs[0].hex}


def test_budget_zero_leaves_the_images(store: Store):
    image, other = image_of(store, "env", "a", "b"), image_of(store, "other", "c")
    root = root_tree(store, image)
    loose = put_layer(store, [File("x", Bytes(b"loose"))])
    store.remember("layer", "key", loose.to_json())
    assert names(collect(store, 0, young=600)) & {loose.digest.hex, root.name} == set()  # all of it is young
    done = collect(store, 0)
    assert {loose.digest.hex, root.name} < names(done)
    assert not (store.root / "trees").exists() or not list((store.root / "trees").iterdir())
    assert store.recall("layer", "key") is None  # in the same go
    for complete in (image, other):
        assert store.image(complete.digest) == complete
        assert all(store.has(layer.digest, layer.size) for layer in complete.manifest.layers)
    assert root_tree(store, image) == root


def test_images_go_last_and_only_when_asked_for(store: Store):
    base = put_layer(store, [File("base", Bytes(os.urandom(50_000)))])
    tops = [put_layer(store, [File("top", Bytes(os.urandom(50_000)))]) for _ in range(3)]
    images = [put_image(store, f"env-{n}", [base, top]) for n, top in enumerate(tops)]
    for n, image in enumerate(images):
        age(store.blob(image.digest), 10 - n)
        for layer in image.manifest.layers:
            age(store.blob(layer.digest), 10 - n)
    store.close()
    budget = usage(store).total - 60_000
    assert collect(store, budget).images == ()
    done = collect(store, budget, images=True)
    assert done.images == ("env-0", "env-1")
    assert set(store.images()) == {"env-2"}
    assert [store.blob(top.digest).exists() for top in tops] == [False, False, True]
    assert store.blob(base.digest).exists()
    pin(store, "env-2")
    assert collect(store, 0, images=True).images == ()
    unpin(store, "env-2")
    assert collect(store, 0, images=True).images == ("env-2",)
    assert list((store.root / "blobs" / "sha256").iterdir()) == []


def test_pins(store: Store):
    image = image_of(store, "env", "a")
    root = root_tree(store, image)
    blob = store.put(b"PK\x03\x04 pinned")
    assert pin(store, "env") == "env"
    assert pin(store, f"any@{blob}") == str(blob)
    assert read_pins(store) == ("env", str(blob))
    assert pinned(store) == {image.digest, blob}
    assert image_entries(store)[0].pinned
    done = collect(store, 0, images=True)
    assert reasons(done).keys() <= {Reason.LOCK}
    assert root.exists()
    changed = image_of(store, "env", "b")  # the name stands for what it points at now
    collect(store, 0, images=True)
    assert not root.exists()
    assert store.find_image("env") == changed.digest
    with pytest.raises(InputError, match="no image is named `emv`") as caught:
        pin(store, "emv")
    assert caught.value.hint == "did you mean `env`?"
    with pytest.raises(InputError, match="is not in the store"):
        pin(store, str(Digest.of(b"absent")))
    with pytest.raises(InputError, match="`other` is not pinned"):
        unpin(store, "other")
    assert unpin(store, str(blob)) == str(blob)
    collect(store, 0)
    assert not store.has(blob)


def test_leases_are_respected_and_cover_all_of_an_image(store: Store):
    image = image_of(store, "env", "a", "b")
    root = root_tree(store, image)
    store.drop_image("env")
    blob = store.put(b"PK\x03\x04 in use")
    with Store(store.root).lease([image.digest, blob], "a job"):
        done = collect(store, 0, images=True)
        assert done.removed == ()
        assert (root / "f" / "a").exists()
        assert store.image(image.digest) == image
        assert all(store.has(layer.digest) for layer in image.manifest.layers)
    collect(store, 0)
    assert not root.exists()
    assert not store.has(blob)


def test_what_is_used_between_planning_and_removing_stays(store: Store):
    found, leased, anew = (store.put(os.urandom(5000)) for _ in range(3))
    for digest in (found, leased, anew):
        age(store.blob(digest), 1)
    store.close()
    collector = Store(store.root)
    plan = make_plan(collector, 0, young=0)
    assert {found.hex, leased.hex, anew.hex} <= names(plan)
    user = Store(store.root)
    assert user.has(found)
    user.protect(leased)
    store.blob(anew).write_bytes(b"made anew")
    done = carry_out(collector, plan)
    assert names(done) & {found.hex, leased.hex, anew.hex} == set()
    user.close()


def test_an_image_that_comes_into_use_between_planning_and_removing_stays(store: Store):
    image = image_of(store, "env", "a")
    store.close()
    collector, user = Store(store.root), Store(store.root)
    plan = make_plan(collector, 0, images=True, young=0)
    assert plan.images == ("env",)
    assert user.find_image("env") == image.digest
    done = carry_out(collector, plan)
    assert done.images == ()
    assert user.image(image.digest) == image
    assert all(user.has(layer.digest) for layer in image.manifest.layers)


def test_a_clock_that_went_backwards_loses_nothing(store: Store):
    """What was used "in the future" counts as used last, and is neither old nor left over."""
    image = image_of(store, "env", "a")
    blobs = [store.put(b"PK\x03\x04" + os.urandom(40_000)) for _ in range(3)]
    for blob, days in zip(blobs, (-365, 1, 2), strict=True):
        age(store.blob(blob), days)
    age(store.blob(image.digest), -365)
    done = collect(store, usage(store).total - 50_000, young=600)
    assert names(done) & {blob.hex for blob in blobs} == {blobs[1].hex, blobs[2].hex}
    done = collect(store, 0, images=True, young=600)  # young, as far as anybody can tell
    assert blobs[0].hex not in names(done)
    assert done.images == ()
    assert store.has(blobs[0])
    assert abs(store.blob(blobs[0]).stat().st_mtime - time.time()) < 60, "used now, by the clock there is"


def test_last_use_is_recorded_at_most_once_an_hour(store: Store):
    digest = store.put(b"data")
    path = store.blob(digest)
    age(path, 0.5 / 24)
    before = path.stat().st_mtime_ns
    assert store.has(digest)
    assert path.stat().st_mtime_ns == before
    age(path, 2 / 24)
    assert store.has(digest)
    assert time.time() - path.stat().st_mtime < 60


def test_hard_links_count_once_and_evicting_frees_what_is_said(store: Store):
    image = image_of(store, "env", "a", size=300_000)
    plain = usage(store).total
    root_tree(store, image)
    kinds = usage(store).by_kind()
    assert kinds["tree"][1] > 300_000
    assert kinds["root"][1] < 100_000  # directories, and what mounts need
    assert usage(store).total < plain + 500_000
    before = usage(store).total
    done = collect(store, 0)
    freed = sum(entry.size for entry in done.removed)
    assert before - usage(store).total == pytest.approx(freed, abs=30_000)


def test_kinds(store: Store):
    image = image_of(store, "env", "a")
    store.put(b"PK\x03\x04 wheel")
    store.put(b"!<arch>\n deb")
    store.put(b"\x1f\x8b archive")
    store.remember("bytecode", "k", {"digest": str(store.put(b"\x28\xb5\x2f\xfd pyc"))})
    store.put(b"anything")
    counts = {kind: count for kind, (count, _) in usage(store).by_kind().items()}
    assert counts == {"layer": 1, "document": 2, "wheel": 1, "deb": 1, "archive": 1, "bytecode": 1, "other": 1}
    assert len(image.manifest.layers) == 1


@pytest.mark.parametrize("file", ["index.json", "pins.json"])
def test_nothing_is_collected_when_it_is_not_known_what_must_stay(store: Store, file: str):
    image_of(store, "env", "a")
    (store.root / file).write_text('{"manifests": [')
    with pytest.raises(StoreDamagedError, match=file):
        make_plan(store, 0)


def test_two_collections_at_once(store: Store):
    blobs = [store.put(os.urandom(100)) for _ in range(20)]
    store.close()
    one, two = Store(store.root), Store(store.root)
    plans = [make_plan(one, 0, young=0), make_plan(two, 0, young=0)]
    first, second = carry_out(one, plans[0]), carry_out(two, plans[1])
    assert {blob.hex for blob in blobs} <= names(first)
    assert {blob.hex for blob in blobs} & names(second) == set()
