from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from envbuilder.atomic import DiskFullError, atomic_file, atomic_folder, explain_full_disk, remove_tree
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import File, write_layer
from envbuilder.oci.model import CONFIG, Config, Descriptor, History, Image, Manifest
from envbuilder.store.store import BlobMismatchError, NotInStoreError, Store, default_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class BreakOff(Exception):  # noqa: N818 (it is not an error)
    """Work that ends before it is done."""


@contextmanager
def broken_off() -> Iterator[None]:
    with pytest.raises(BreakOff):
        yield


def image_in(store: Store, text: bytes = b"hello") -> Image:
    with store.writer() as blob:
        layer = write_layer([File("etc/hello", Bytes(text))], blob.file)
        blob.commit(layer.digest)
    config = Config(
        "amd64", "2025-12-01T00:00:00Z", {"A": "b"}, {"l": "m"}, (layer.diff_id,), (History("x"),), cmd=("sh",)
    )
    data = config.to_bytes()
    return Image(Manifest(Descriptor(CONFIG, Digest.of(data), len(data)), (layer.descriptor,)), config)


def test_the_root_honours_xdg(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(default_root()) == "/somewhere/envbuilder/store"


def test_blobs(tmp_path: Path):
    store = Store(tmp_path / "s")
    digest = store.put(b"data")
    assert store.has(digest)
    assert store.read(digest) == b"data"
    with pytest.raises(NotInStoreError):
        store.read(Digest.of(b"other"))
    store.blob(digest).write_bytes(b"dama")
    with pytest.raises(BlobMismatchError):
        store.read(digest)


def test_putting_bytes_repairs_what_was_damaged(tmp_path: Path):
    store = Store(tmp_path)
    digest = store.put(b"a document")
    store.blob(digest).write_bytes(b"a dOcument")
    with pytest.raises(BlobMismatchError) as caught:
        store.read(digest)
    assert "envbuilder cache verify" in str(caught.value.hint)
    assert store.put(b"a document") == digest
    assert store.read(digest) == b"a document"


def test_nothing_is_kept_without_a_commit(tmp_path: Path):
    store = Store(tmp_path / "s")
    with broken_off(), store.writer() as blob:
        blob.file.write(b"half")
        raise BreakOff
    assert not list((tmp_path / "s" / "partial").iterdir())
    assert not list((tmp_path / "s" / "blobs" / "sha256").iterdir())


def test_adopting_verifies(tmp_path: Path):
    store = Store(tmp_path / "s")
    file = tmp_path / "f"
    file.write_bytes(b"data")
    with pytest.raises(BlobMismatchError):
        store.adopt(file, Digest.of(b"other"))
    assert file.exists()
    os.utime(file, (0, 0))
    store.adopt(file, Digest.of(b"data"))
    assert store.blob(Digest.of(b"data")).stat().st_mtime > 0  # used now
    assert store.read(Digest.of(b"data")) == b"data"


def test_images_by_name_in_a_valid_layout(tmp_path: Path):
    store = Store(tmp_path / "s")
    image = image_in(store)
    descriptor = store.put_image(image, "env")
    assert store.find_image("env") == descriptor.digest == image.digest
    assert store.find_image("other") is None
    assert store.image(descriptor.digest) == image
    store.put_image(image_in(store, b"changed"), "env")
    index = json.loads((tmp_path / "s" / "index.json").read_text())
    assert len(index["manifests"]) == 1
    assert json.loads((tmp_path / "s" / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    assert (tmp_path / "s" / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_an_image_without_its_layers_is_not_kept(tmp_path: Path):
    image = image_in(Store(tmp_path / "one"))
    with pytest.raises(NotInStoreError, match="layer"):
        Store(tmp_path / "two").put_image(image, "env")


def test_knowledge(tmp_path: Path):
    store = Store(tmp_path / "s")
    assert store.recall("layer", "key/with any: characters") is None
    store.remember("layer", "key/with any: characters", {"a": 1})
    assert store.recall("layer", "key/with any: characters") == {"a": 1}
    next((tmp_path / "s" / "known" / "layer").iterdir()).write_text("{half")
    assert store.recall("layer", "key/with any: characters") is None


def test_files_are_there_whole_or_not_at_all(tmp_path: Path):
    target = tmp_path / "x" / "file"
    with broken_off(), atomic_file(target) as file:
        file.write(b"half")
        raise BreakOff
    assert not list(target.parent.iterdir())
    with atomic_file(target) as file:
        file.write(b"whole")
    assert target.read_bytes() == b"whole"


def test_folders_are_there_whole_or_not_at_all(tmp_path: Path):
    target = tmp_path / "tree"
    with broken_off(), atomic_folder(target) as folder:
        (folder / "half").write_text("")
        raise BreakOff
    assert not list(tmp_path.iterdir())
    for _ in range(2):  # the second finds the first one's
        with atomic_folder(target) as folder:
            (folder / "whole").write_text("")
    assert [p.name for p in tmp_path.iterdir()] == ["tree"]
    (target / "sub").mkdir()
    (target / "sub").chmod(0o500)
    remove_tree(target)
    assert not target.exists()


def test_a_full_disk_is_explained(tmp_path: Path):
    with pytest.raises(DiskFullError) as caught, explain_full_disk(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.exit_code == 4
    assert caught.value.hint is not None
    with pytest.raises(PermissionError), explain_full_disk(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_many_processes_name_images_at_once(tmp_path: Path):
    store = Store(tmp_path / "s")
    image = image_in(store)
    store.put_image(image, "first")
    program = (
        "import sys; from pathlib import Path; from envbuilder.store.store import Store\n"
        "store = Store(Path(sys.argv[1])); image = store.image(store.find_image('first'))\n"
        "[store.put_image(image, f'{sys.argv[2]}-{n}') for n in range(10)]\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(store.root), str(n)]) for n in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert all(store.find_image(f"{p}-{n}") == image.digest for p in range(4) for n in range(10))
