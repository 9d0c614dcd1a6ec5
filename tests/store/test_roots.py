"""Layers over each other, as container engines put them."""

from __future__ import annotations

import io
import json
import stat
import tarfile
from typing import TYPE_CHECKING, cast

import docker
import pytest

from envbuilder.images.load import load
from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import Directory, File, Hardlink, Symlink
from envbuilder.store.roots import MOUNT_FOLDERS, root_tree
from envbuilder.store.store import Store
from envbuilder.store.unpack import IMPLIED, UnpackError, tree_of
from tests import smallimage
from tests.smallimage import put_image, put_layer
from tests.store.tars import TEXT, TarMember, member, put_gzip, put_plain, tar_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envbuilder.oci.model import Layer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def foreign(store: Store, *members: TarMember) -> Layer:
    return put_gzip(store, tar_of(members))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def content(root: Path) -> dict[str, bytes | str]:
    """Return what a root holds besides its mount points: bytes of files, targets of links."""
    result: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            result[name] = f"-> {path.readlink()}"
        elif path.is_file() and name not in {"etc/hosts", "etc/resolv.conf"}:
            result[name] = path.read_bytes()
    return result


def test_upper_wins(store: Store):
    lower = put_layer(
        store,
        [
            File("same", Bytes(b"lower")),
            File("kept", Bytes(b"lower")),
            File("becomes-directory", Bytes(b"lower")),
            File("becomes-file/x", Bytes(b"lower")),
            Symlink("becomes-real", "kept"),
            File("becomes-link", Bytes(b"lower")),
            Directory("shared", 0o700),
            File("shared/lower", Bytes(b"lower")),
        ],
    )
    upper = put_layer(
        store,
        [
            File("same", Bytes(b"upper")),
            File("becomes-directory/x", Bytes(b"upper")),
            File("becomes-file", Bytes(b"upper")),
            File("becomes-real", Bytes(b"upper")),
            Symlink("becomes-link", "kept"),
            Directory("shared", 0o755),
            File("shared/upper", Bytes(b"upper")),
        ],
    )
    root = root_tree(store, put_image(store, "image", [lower, upper]))
    assert content(root) == {
        "same": b"upper",
        "kept": b"lower",
        "becomes-directory/x": b"upper",
        "becomes-file": b"upper",
        "becomes-real": b"upper",
        "becomes-link": "-> kept",
        "shared/lower": b"lower",
        "shared/upper": b"upper",
    }
    assert mode(root / "shared") == 0o755
    assert mode(root) == 0o755
    assert all((root / folder).is_dir() for folder in MOUNT_FOLDERS)
    tree = tree_of(store, lower.descriptor)
    assert (tree / "same").read_bytes() == b"lower"
    assert (tree / "kept").stat().st_ino == (root / "kept").stat().st_ino


def test_whiteouts(store: Store):
    names = ["a/gone", "a/kept", "b/gone/deep", "b/also-gone", "c/replaced/old", "top"]
    lower = put_layer(store, [File(name, Bytes(b"lower")) for name in names])
    upper = foreign(
        store,
        member("a/.wh.gone"),
        member("b/new"),
        member("b/.wh..wh..opq"),
        member("c/.wh.replaced"),
        member("c/replaced/new"),
        member(".wh.top"),
        member(".wh.never-there"),
        member(".wh..wh.aufs"),
    )
    root = root_tree(store, put_image(store, "image", [lower, upper]))
    assert content(root) == {"a/kept": b"lower", "b/new": TEXT, "c/replaced/new": TEXT}
    assert (tree_of(store, lower.descriptor) / "top").exists()


def test_whiteout_of_a_link_leaves_its_target(store: Store, tmp_path: Path):
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    lower = put_layer(store, [Symlink("door", str(outside)), File("x", Bytes(TEXT))])
    upper = foreign(store, member(".wh.door"))
    assert content(root_tree(store, put_image(store, "image", [lower, upper]))) == {"x": TEXT}
    assert (outside / "inner").exists()


def test_a_link_of_a_lower_layer_is_never_followed(store: Store, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    lower = put_layer(store, [Symlink("door", str(outside))])
    stated = put_layer(store, [File("door/file", Bytes(TEXT))])
    assert content(root_tree(store, put_image(store, "stated", [lower, stated]))) == {"door/file": TEXT}
    implied = foreign(store, member("door/file"))
    with pytest.raises(UnpackError, match="below `door`, which is not a directory"):
        root_tree(store, put_image(store, "implied", [lower, implied]))
    assert list(outside.iterdir()) == []


def test_a_parent_that_is_not_stated_keeps_the_lower_mode(store: Store):
    lower = put_layer(store, [Directory("tmp", 0o1777)])
    upper = foreign(store, member("tmp/file"), member("new/file"))
    root = root_tree(store, put_image(store, "image", [lower, upper]))
    assert mode(root / "tmp") == 0o1777
    assert not list(root.rglob(IMPLIED))


def test_mount_points_replace_links(store: Store, tmp_path: Path):
    outside = tmp_path / "resolv.conf"
    layer = put_layer(store, [Symlink("etc/resolv.conf", str(outside)), Symlink("run", str(tmp_path))])
    root = root_tree(store, put_image(store, "image", [layer]))
    assert (root / "etc/resolv.conf").read_bytes() == b""
    assert not (root / "run").is_symlink()
    assert not outside.exists()


def test_a_second_call_and_a_second_root_cost_little(store: Store):
    layers = [put_layer(store, [File(f"{number}", Bytes(TEXT))]) for number in range(3)]
    image = put_image(store, "image", layers)
    root = root_tree(store, image)
    for layer in layers:
        store.blob(layer.digest).unlink()
    assert root_tree(store, image) == root
    (root / "mark").touch()
    assert (root_tree(store, image) / "mark").exists()


# -- what container engines make of changes ------------------------------------------------------------------------


def test_a_directory_is_removed_and_made_again(store: Store):
    """``rm -r d && mkdir d``: buildah writes a whiteout beside the new directory, others an opaque marker in it."""
    lower = put_layer(store, [Directory("d", 0o700), File("d/old", Bytes(b"old")), File("d/e/old", Bytes(b"old"))])
    again = [member("d", tarfile.DIRTYPE, mode=0o755), member("d/new")]
    ways = {
        "beside": foreign(store, member(".wh.d"), *again),
        "after": foreign(store, *again, member(".wh.d")),
        "inside": foreign(store, *again, member("d/.wh..wh..opq")),
        "inside, first": foreign(store, again[0], member("d/.wh..wh..opq"), again[1]),
    }
    for name, upper in ways.items():
        root = root_tree(store, put_image(store, name, [lower, upper]))
        assert content(root) == {"d/new": TEXT}, name
        assert mode(root / "d") == 0o755


def test_an_opaque_marker_without_its_directory_stated(store: Store):
    lower = put_layer(store, [Directory("d", 0o700), File("d/old", Bytes(b"old")), File("kept", Bytes(b""))])
    root = root_tree(store, put_image(store, "image", [lower, foreign(store, member("d/.wh..wh..opq"))]))
    assert content(root) == {"kept": b""}
    assert mode(root / "d") == 0o700


def test_a_whiteout_reaches_through_all_layers_below_and_none_above(store: Store):
    one = put_layer(store, [File("a", Bytes(b"1")), File("d/b", Bytes(b"1"))])
    two = put_layer(store, [File("unrelated", Bytes(b"2"))])
    three = foreign(store, member(".wh.a"), member("d/.wh.b"))
    four = put_layer(store, [File("a", Bytes(b"4"))])
    assert content(root_tree(store, put_image(store, "3", [one, two, three]))) == {"unrelated": b"2"}
    assert content(root_tree(store, put_image(store, "4", [one, two, three, four]))) == {"unrelated": b"2", "a": b"4"}


def test_a_whiteout_and_the_file_itself_in_one_layer(store: Store):
    """A whiteout speaks of the layers below, wherever it stands."""
    lower = put_layer(store, [File("x", Bytes(b"lower"))])
    for number, members in enumerate(([member(".wh.x"), member("x")], [member("x"), member(".wh.x")])):
        image = put_image(store, f"{number}", [lower, foreign(store, *members)])
        assert content(root_tree(store, image)) == {"x": TEXT}


def test_hard_links_outlive_the_whiteout_of_their_first_name(store: Store):
    lower = put_layer(store, [File("a", Bytes(b"same")), Hardlink("b", "a"), Hardlink("c", "a")])
    upper = foreign(store, member(".wh.a"), member("c"))
    root = root_tree(store, put_image(store, "image", [lower, upper]))
    assert content(root) == {"b": b"same", "c": TEXT}
    tree = tree_of(store, lower.descriptor)
    assert {name: (tree / name).read_bytes() for name in "abc"} == dict.fromkeys("abc", b"same")


def test_a_directory_becomes_a_link_and_a_link_a_directory(store: Store):
    lower = put_layer(
        store, [File("lib/x", Bytes(b"lower")), File("real/y", Bytes(b"lower")), Symlink("alias", "real")]
    )
    upper = put_layer(store, [Symlink("lib", "real"), Directory("alias"), File("alias/z", Bytes(b"upper"))])
    root = root_tree(store, put_image(store, "image", [lower, upper]))
    assert content(root) == {"lib": "-> real", "real/y": b"lower", "alias/z": b"upper"}


def test_names_of_storage_drivers_mean_nothing(store: Store):
    """aufs left such names in layers of its time; its hard links lead into one of its folders."""
    upper = foreign(
        store,
        member(".wh..wh.aufs"),
        member(".wh..wh.orph", tarfile.DIRTYPE, mode=0o755),
        member(".wh..wh.plnk/7", mode=0o644),
        member("linked", tarfile.LNKTYPE, ".wh..wh.plnk/7"),
    )
    assert content(root_tree(store, put_image(store, "image", [upper]))) == {"linked": TEXT}


CHANGES = (
    "mkdir -p /d/e /keep /swap && echo 1 > /d/e/f && echo 1 > /d/g && echo 1 > /keep/x && echo 1 > /swap/in && ln /d/g /keep/hard",
    "rm -r /d && mkdir -p /d/e && echo 2 > /d/e/new",
    "rm /keep/x && rm -r /swap && ln -s keep /swap && ln /keep/hard /keep/harder && chmod 700 /keep",
    "rm /swap && mkdir /swap && echo 4 > /swap/again && rm /keep/hard && touch /keep/x",
    "rm -r /swap /d/e/new && mkdir /d/opaque && touch /d/opaque/1 && chown 12:34 /d/opaque/1",
)


@pytest.mark.docker
def test_layers_that_docker_makes(store: Store, docker_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After each of some changes made and committed in containers, our root is the container's file system."""
    monkeypatch.setattr(smallimage, "PROGRAMS", (*smallimage.PROGRAMS, "ln", "chmod", "chown"))
    image = smallimage.small_image(store)
    client = docker.DockerClient(docker_engine)
    try:
        tag = load(image, store, "docker", "small")
        for number, change in enumerate(CHANGES):
            container = client.containers.create(tag, ["sh", "-c", change], network_mode="none")
            container.start()
            assert container.wait()["StatusCode"] == 0, container.logs()
            exported = b"".join(cast("Iterator[bytes]", container.export()))  # the stubs say str
            committed = container.commit("envbuilder/changes", f"{number}")
            tag = str(committed.id)
            container.remove()
            layers = saved_layers(store, b"".join(committed.save()))
            assert len(layers) == 3 + number
            root = root_tree(store, put_image(store, "changes", layers))
            (tmp_path / f"{number}").mkdir()
            with tarfile.open(fileobj=io.BytesIO(exported)) as tar:
                tar.extractall(tmp_path / f"{number}", filter="fully_trusted")  # noqa: S202  (our own container's)
            assert described(root) == described(tmp_path / f"{number}"), change
    finally:
        client.close()


def saved_layers(store: Store, archive: bytes) -> list[Layer]:
    """Return the layers of an image as ``docker save`` writes it."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:

        def read(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        (saved,) = json.loads(read("manifest.json"))
        return [put_plain(store, read(name)) for name in saved["Layers"]]


def described(root: Path) -> dict[str, object]:
    """Return what a root holds, without what containers and roots have to be mounted on."""
    mounted = {
        *MOUNT_FOLDERS,
        "usr/local",
        "usr/local/nvidia",
        "etc/hosts",
        "etc/resolv.conf",
        "etc/hostname",
        "etc/mtab",
    }
    found: dict[str, object] = {}
    names: dict[int, list[str]] = {}
    for path in sorted(root.rglob("*")):
        name, status = str(path.relative_to(root)), path.lstat()
        if name in mounted or name == ".dockerenv" or name.startswith("dev/"):
            continue
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        same = names.setdefault(status.st_ino, [])  # the names of one file
        same.append(name)
        found[name] = (oct(status.st_mode), status.st_uid, status.st_gid, content, same)
    return found
