"""The store: blobs by digest, knowledge by key, unpacked trees by diff id.

The folder is a valid OCI image layout, so that skopeo and others can read images straight from it::

    CACHEDIR.TAG  oci-layout  index.json      images by name (org.opencontainers.image.ref.name)
    blobs/sha256/<hex>                        layers, manifests, configurations, wheels, Debian packages
    partial/<hex>                             downloads under way, continued by the next run
    known/<kind>/<key>.json                   what is known: layer key -> layer, image records
    trees/<diff id>/ roots/<image digest>/    unpacked layers, and the root trees made of them by hard links
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import platformdirs
from filelock import FileLock

from envbuilder.atomic import PREFIX, atomic_file, explain_full_disk
from envbuilder.errors import EnvbuilderError
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import INDEX, Config, Descriptor, Image, Manifest, canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterator

_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache made by envbuilder.\n"
_NAME = "org.opencontainers.image.ref.name"


class BlobMismatchError(EnvbuilderError):
    """Bytes that were to enter the store do not have the digest they should have; they were not kept."""

    def __init__(self, expected: Digest, actual: Digest) -> None:
        super().__init__(f"the content has digest {actual}, not {expected}")
        self.expected = expected
        self.actual = actual


class NotInStoreError(EnvbuilderError):
    """A blob or image was asked for that is not in the store."""

    exit_code = 2


def default_root() -> Path:
    """Return where the store lies: the user's cache folder (XDG_CACHE_HOME is honoured)."""
    return Path(platformdirs.user_cache_path("envbuilder")) / "store"


class Store:
    """A store at ``root``, made on first use. Safe to share between threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with explain_full_disk(root):
            (root / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        for name, text in (("CACHEDIR.TAG", _TAG), ("oci-layout", '{"imageLayoutVersion":"1.0.0"}')):
            if not (root / name).exists():
                self._write(root / name, text.encode())

    # -- blobs ------------------------------------------------------------------------------------------------

    def blob(self, digest: Digest) -> Path:
        """Return where a blob lies or would lie."""
        return self.root / "blobs" / "sha256" / digest.hex

    def has(self, digest: Digest) -> bool:
        """Return whether the blob is there. What is there was verified when it came in."""
        return self.blob(digest).exists()

    def put(self, data: bytes) -> Digest:
        """Keep some bytes and return their digest."""
        digest = Digest.of(data)
        if not self.has(digest):
            self._write(self.blob(digest), data)
        return digest

    def read(self, digest: Digest) -> bytes:
        """Return a small blob's bytes; raise NotInStoreError when it is absent, BlobMismatchError when damaged."""
        try:
            data = self.blob(digest).read_bytes()
        except FileNotFoundError as error:
            raise NotInStoreError(f"{digest} is not in the store") from error
        if (actual := Digest.of(data)) != digest:
            raise BlobMismatchError(digest, actual)
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
        path.chmod(0o644)
        path.rename(self.blob(digest))

    def partial(self, digest: Digest) -> Path:
        """Return where a download of this blob is kept until it is whole."""
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
        """Remember a JSON value under a key of any characters."""
        self._write(self._known(kind, key), canonical_json(value) + b"\n")

    def _known(self, kind: str, key: str) -> Path:
        return self.root / "known" / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    # -- images -----------------------------------------------------------------------------------------------

    def put_image(self, image: Image, name: str) -> Descriptor:
        """Keep manifest and configuration and let ``name`` point at the image. Its layers must be there.

        Raises:
            NotInStoreError: a layer is missing.

        """
        for layer in image.manifest.layers:
            if not self.has(layer.digest):
                raise NotInStoreError(f"layer {layer.digest} of `{name}` is not in the store")
        self.put(image.config.to_bytes())
        self.put(image.manifest.to_bytes())
        descriptor = image.descriptor
        named = Descriptor(descriptor.media_type, descriptor.digest, descriptor.size, {_NAME: name})
        with self.lock("index"):
            others = [d for d in self._index() if d.annotations.get(_NAME) != name]
            entries = sorted([*others, named], key=lambda d: d.annotations.get(_NAME, ""))
            document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [d.to_json() for d in entries]}
            self._write(self.root / "index.json", canonical_json(document))
        return descriptor

    def find_image(self, name: str) -> Digest | None:
        """Return the digest of the image that ``name`` points at."""
        return next((d.digest for d in self._index() if d.annotations.get(_NAME) == name), None)

    def image(self, digest: Digest) -> Image:
        """Return an image by its manifest's digest; raise NotInStoreError when it is absent."""
        manifest = Manifest.from_bytes(self.read(digest))
        return Image(manifest, Config.from_bytes(self.read(manifest.config.digest)))

    def _index(self) -> list[Descriptor]:
        try:
            document = json.loads((self.root / "index.json").read_bytes())
        except FileNotFoundError:
            return []
        return [Descriptor.from_json(entry) for entry in document["manifests"]]

    # -- the rest ---------------------------------------------------------------------------------------------

    def lock(self, name: str) -> FileLock:
        """Return a lock between processes, for use as a context manager."""
        folder = self.root / "locks"
        folder.mkdir(exist_ok=True)
        return FileLock(folder / f"{name}.lock")

    def temporary_name(self) -> Path:
        """Return a fresh path for a temporary file on the store's file system."""
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
        self._path.chmod(0o644)
        self._path.rename(self._store.blob(digest))

    def close(self) -> None:
        """Drop what was written without a commit."""
        self.file.close()
        self._path.unlink(missing_ok=True)
