"""The store: blobs by digest, knowledge by key, unpacked trees by the digest of their layer.

The folder is a valid OCI image layout, so that skopeo and others can read images straight from it::

    CACHEDIR.TAG  oci-layout  index.json      images by name (org.opencontainers.image.ref.name)
    blobs/sha256/<hex>                        layers, manifests, configurations, wheels, Debian packages
    partial/<hex>                             downloads under way, continued by the next run
    known/<kind>/<key>.json                   what is known: layer key -> layer, image records
    trees/<layer digest>/ roots/<image digest>/ unpacked layers, and the root trees made of them by hard links
    format  pins.json                         which versions of the tool may work here; what is never evicted
    leases/ locks/                            who relies on what now (see ``leases``), and locks between processes
    trash/ quarantine/                        what the collector is deleting; damaged blobs, for inspection

The time of last use of a blob, a tree and a root is its mtime, which ``touch`` sets at most once an hour.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import platformdirs

from envbuilder.atomic import PREFIX, atomic_file, explain_full_disk, sync_folder
from envbuilder.errors import EnvbuilderError, HostError
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import INDEX, Descriptor, Image, ImageFormatError, Manifest, canonical_json
from envbuilder.store.leases import HeldLease, gate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from filelock import FileLock

_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache made by envbuilder.\n"
_NAME = "org.opencontainers.image.ref.name"
#: The version of all this. A later tool that changes what an older one relies on raises it.
FORMAT = 1
#: The time of last use is written anew when it is older than so many seconds.
_TOUCH = 3600


class BlobMismatchError(EnvbuilderError):
    """Bytes that were to enter the store do not have the digest they should have; they were not kept."""

    def __init__(self, expected: Digest, actual: Digest, *, hint: str | None = None) -> None:
        super().__init__(f"the content has digest {actual}, not {expected}", hint=hint)
        self.expected = expected
        self.actual = actual


class NotInStoreError(EnvbuilderError):
    """A blob or image was asked for that is not in the store."""

    exit_code = 2


class StoreFormatError(HostError):
    """The store was made by a later version of the tool, in a way that this one does not know."""


class StoreDamagedError(HostError):
    """A file of the store itself, the index or the pins, cannot be read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is damaged: {reason}", hint="`envbuilder cache verify` moves it aside; nothing else is touched"
        )
        self.path = path
        self.reason = reason


def default_root() -> Path:
    """Return where the store lies: the user's cache folder (XDG_CACHE_HOME is honoured)."""
    return Path(platformdirs.user_cache_path("envbuilder")) / "store"


class Store:
    """A store at ``root``, made on first use. Safe to share between threads and processes.

    As long as this object lives, nothing is collected that was found or put through it: see ``leases``. Who lives for
    weeks makes one for each piece of work.

    Raises:
        StoreFormatError: a later version of the tool made it.

    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mutex = threading.Lock()
        self._lease: HeldLease | None = None
        with explain_full_disk(root):
            (root / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        self._check_format()
        for name, text in (("CACHEDIR.TAG", _TAG), ("oci-layout", '{"imageLayoutVersion":"1.0.0"}')):
            if not (root / name).exists():
                self._write(root / name, text.encode())

    def _check_format(self) -> None:
        path = self.root / "format"
        try:
            text = path.read_text("utf-8", "replace").strip()
        except FileNotFoundError:  # new, or from before there was this file
            with suppress(PermissionError):
                self._write(path, f"{FORMAT}\n".encode())
            return
        if not text.isdecimal():
            raise StoreDamagedError(path, f"it says {text[:20]!r} instead of a number")
        if int(text) > FORMAT:
            raise StoreFormatError(
                f"the store at {self.root} has format {text}, and this version of envbuilder knows {FORMAT}",
                hint="use the newer envbuilder, or a store of its own for this one: set XDG_CACHE_HOME",
            )

    # -- what is in use ---------------------------------------------------------------------------------------

    @property
    def held(self) -> HeldLease:
        """The lease of this object, begun at the first need and released with the object."""
        with self._mutex:
            if self._lease is None:
                words = (Path(sys.argv[0]).name, *(word for word in sys.argv[1:2] if word.isalpha()))
                self._lease = HeldLease(self.root, " ".join(words))
                weakref.finalize(self, self._lease.release)
            return self._lease

    def close(self) -> None:
        """Let go of all that was found and put. A later use begins a new lease."""
        with self._mutex:
            if self._lease is not None:
                self._lease.release()
            self._lease = None

    def protect(self, *digests: Digest) -> None:
        """Have nothing under these digests collected from now on: blobs, trees (by layer), roots (by image).

        A manifest's digest stands for all that the image consists of. Call it first, then look whether it is there.
        """
        self.held.add(digests)

    @contextmanager
    def lease(self, digests: Iterable[Digest], name: str) -> Iterator[None]:
        """Protect digests inside the block only; ``name`` says to people what for."""
        with HeldLease(self.root, name) as lease:
            lease.add(digests)
            yield

    # -- blobs ------------------------------------------------------------------------------------------------

    def blob(self, digest: Digest) -> Path:
        """Return where a blob lies or would lie."""
        return self.root / "blobs" / "sha256" / digest.hex

    def has(self, digest: Digest, size: int | None = None) -> bool:
        """Return whether the blob is there, and of the size that it should have when that is known.

        What is there was verified when it came in; a disk that lost power may have lost the end of it since. If it is
        there it stays, and counts as used now.
        """
        self.protect(digest)
        path = self.blob(digest)
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        if size is not None and status.st_size != size:
            return False
        touch(path, status)
        return True

    def put(self, data: bytes) -> Digest:
        """Keep some bytes and return their digest. A damaged blob under it is replaced: here are the right bytes."""
        digest = Digest.of(data)
        if not self.has(digest, len(data)) or self.blob(digest).read_bytes() != data:
            with gate(self.root):
                self._write(self.blob(digest), data)
        return digest

    def read(self, digest: Digest) -> bytes:
        """Return a small blob's bytes; raise NotInStoreError when it is absent, BlobMismatchError when damaged."""
        self.protect(digest)
        try:
            data = self.blob(digest).read_bytes()
        except FileNotFoundError as error:
            raise NotInStoreError(
                f"{digest} is not in the store", hint="`envbuilder cache verify` says what is missing"
            ) from error
        if (actual := Digest.of(data)) != digest:
            hint = "`envbuilder cache verify` moves what was damaged here aside; build or pull the image again then"
            raise BlobMismatchError(digest, actual, hint=hint)
        return data

    @contextmanager
    def writer(self) -> Iterator[BlobWriter]:
        """Write a blob as a stream: write to ``.file``, then call ``commit`` with its digest inside the block.

        Without a commit nothing is kept.
        """
        handle = BlobWriter(self)
        with explain_full_disk(self.root):
            try:
                yield handle
            finally:
                handle.close()

    def adopt(self, path: Path, digest: Digest) -> None:
        """Move a file of the same file system into the store after verifying its digest.

        Raises:
            BlobMismatchError: the digest differs; the file stays where it is.

        """
        if (actual := Digest.of_file(path)) != digest:
            raise BlobMismatchError(digest, actual)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self.settle(path, digest)

    def settle(self, path: Path, digest: Digest) -> None:
        """Let a file of the same file system, verified and synced by the caller, be the blob of its digest."""
        self.protect(digest)
        path.chmod(0o644)
        os.utime(path)  # apt, for one, gives files the time at which they were published
        with gate(self.root):  # so that `verify` does not take it for the damaged one that it replaces
            path.rename(self.blob(digest))

    def partial(self, digest: Digest) -> Path:
        """Return where a download of this blob is kept until it is whole."""
        self.protect(digest)
        folder = self.root / "partial"
        folder.mkdir(exist_ok=True)
        return folder / digest.hex

    # -- knowledge --------------------------------------------------------------------------------------------

    def recall(self, kind: str, key: str) -> Any:
        """Return the JSON value remembered under a key, or None. An unreadable one counts as absent."""
        try:
            return json.loads(self._known(kind, key).read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def remember(self, kind: str, key: str, value: Any) -> None:
        """Remember a JSON value under a key of any characters. If it leads to a blob, put that first."""
        data = canonical_json(value) + b"\n"
        with gate(self.root):  # so that the collector does not take it for the one it replaces
            self._write(self._known(kind, key), data)

    def _known(self, kind: str, key: str) -> Path:
        return self.root / "known" / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    # -- images -----------------------------------------------------------------------------------------------

    def put_image(self, image: Image, name: str) -> Descriptor:
        """Keep manifest and configuration and let ``name`` point at the image. Its layers must be there.

        Raises:
            NotInStoreError: a layer is missing.

        """
        for layer in image.manifest.layers:
            if not self.has(layer.digest, layer.size):
                raise NotInStoreError(f"layer {layer.digest} of `{name}` is not in the store")
        self.put(image.documents.config)
        self.put(image.documents.manifest)
        descriptor = image.descriptor
        named = Descriptor(descriptor.media_type, descriptor.digest, descriptor.size, {_NAME: name})
        if named in self._index():
            touch(self.blob(descriptor.digest))
            return descriptor
        sync_folder(self.root / "blobs" / "sha256")  # before the index says that they are there
        with self.lock("index"):
            others = [d for d in self._index() if d.annotations.get(_NAME) != name]
            self._write_index([*others, named])
        return descriptor

    def find_image(self, name: str) -> Digest | None:
        """Return the digest of the image that ``name`` points at. The image stays, and counts as used now."""
        while (digest := self.images().get(name)) is not None:
            self.protect(digest)
            # Had it been replaced and collected just before, the name would point elsewhere now.
            if self.images().get(name) == digest:
                touch(self.blob(digest))
                return digest
        return None

    def images(self) -> dict[str, Digest]:
        """Return the images by name; raise StoreDamagedError when the index cannot be read."""
        return {d.annotations.get(_NAME, str(d.digest)): d.digest for d in self._index()}

    def drop_image(self, name: str) -> bool:
        """Let ``name`` point at nothing; return whether it pointed at something. Blobs are left to the collector."""
        with self.lock("index"):
            known = name in self.images()
            self.drop_locked({name})
            return known

    def drop_locked(self, names: Collection[str]) -> None:
        """Let names point at nothing, for who holds the lock ``index``."""
        entries = self._index()
        others = [d for d in entries if d.annotations.get(_NAME, str(d.digest)) not in names]
        if len(others) < len(entries):
            self._write_index(others)

    def image(self, digest: Digest) -> Image:
        """Return an image by its manifest's digest; raise NotInStoreError when it is absent."""
        manifest = self.read(digest)
        return Image.from_documents(manifest, self.read(Manifest.from_bytes(manifest).config.digest))

    def _index(self) -> list[Descriptor]:
        path = self.root / "index.json"
        try:
            return [Descriptor.from_json(entry) for entry in json.loads(path.read_bytes())["manifests"]]
        except FileNotFoundError:
            return []
        except (ImageFormatError, KeyError, TypeError, ValueError) as error:
            raise StoreDamagedError(path, str(error)) from error

    def _write_index(self, entries: Iterable[Descriptor]) -> None:
        ordered = sorted(entries, key=lambda d: d.annotations.get(_NAME, ""))
        document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [d.to_json() for d in ordered]}
        self._write(self.root / "index.json", canonical_json(document))

    # -- the rest ---------------------------------------------------------------------------------------------

    def lock(self, name: str) -> FileLock:
        """Return a lock between processes, for use as a context manager."""
        _ = self.held  # the collector leaves locks alone that somebody may wait for
        folder = self.root / "locks"
        folder.mkdir(exist_ok=True)
        from filelock import FileLock  # noqa: PLC0415 (importing it takes longer than all else here; few need it)

        return FileLock(folder / f"{name}.lock")

    def temporary_name(self) -> Path:
        """Return a fresh path for a temporary file on the store's file system."""
        _ = self.held  # without a live lease, what is temporary is left over
        folder = self.root / "partial"
        folder.mkdir(exist_ok=True)
        return folder / f"{PREFIX}{os.getpid()}-{os.urandom(8).hex()}"

    def _write(self, path: Path, data: bytes) -> None:
        with atomic_file(path) as file:
            file.write(data)


class BlobWriter:
    """A blob being written. ``file`` takes the bytes; ``commit`` keeps them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = store.temporary_name()
        self.file: BinaryIO = self._path.open("xb")

    def commit(self, digest: Digest) -> None:
        """Keep what was written under ``digest``, which the caller computed while writing."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self._store.settle(self._path, digest)

    def close(self) -> None:
        """Drop what was written without a commit."""
        self.file.close()
        self._path.unlink(missing_ok=True)


def touch(path: Path, status: os.stat_result | None = None) -> None:
    """Record that a blob, a tree or a root is used now, unless that was recorded within the hour."""
    with suppress(OSError):  # it may be gone, or not ours to change: then it is not ours to evict either
        last = (status or path.stat()).st_mtime
        if not 0 <= time.time() - last < _TOUCH:
            os.utime(path)
