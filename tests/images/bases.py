"""Small images to build on: a real glibc, what else is given, in layers of any compression and media type."""

from __future__ import annotations

import io
import json
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envbuilder.oci.blob import Compression
from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import File, Symlink, write_layer
from envbuilder.oci.model import CONFIG, DOCKER_CONFIG, DOCKER_MANIFEST, MANIFEST, Descriptor, Image, canonical_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envbuilder.oci.layer import Entry
    from envbuilder.oci.model import Layer
    from envbuilder.store.store import Store

DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
OS_RELEASE = b'PRETTY_NAME="Duck 7"\nID=duck\nVERSION_ID="7"\nVERSION_CODENAME=mallard\n'
FOLDER = f"usr/lib/{platform.machine()}-linux-gnu"


def file(path: str, data: bytes = b"", mode: int = 0o644) -> File:
    return File(path, Bytes(data), mode)


def libc(version: str = "2.36", machine: int = 62) -> bytes:
    text = f"GNU C Library (Duck GLIBC {version}-1) stable release version {version}.\n"
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + text.encode()


def python(prefix: str, minor: str) -> list[Entry]:
    return [file(f"{prefix}/bin/python{minor}", mode=0o755), file(f"{prefix}/lib/python{minor}/os.py")]


def system(*more: Entry, version: str = "2.36") -> list[Entry]:
    """Return the entries of a base that fits and lacks nothing, and ``more``."""
    return [
        Symlink("lib", "usr/lib"), Symlink("bin", "usr/bin"),
        file(f"{FOLDER}/libc.so.6", libc(version)),
        *(file(f"{FOLDER}/{name}") for name in ("libgcc_s.so.1", "libstdc++.so.6", "libz.so.1")),
        file("etc/ssl/certs/ca-certificates.crt"), file("etc/os-release", OS_RELEASE),
        file("usr/bin/dash"), Symlink("usr/bin/sh", "dash"), file("usr/bin/gcc"),
        *more,
    ]  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """An image to be made: entries of each layer, and how it is described."""

    layers: Sequence[Sequence[Entry]]
    process: Mapping[str, object] = field(default_factory=dict)
    compressions: Sequence[Compression] = ()
    media_type: str | None = None
    manifest_type: str = MANIFEST
    os: str = "linux"
    architecture: str = "amd64"
    history: Sequence[Mapping[str, object]] = ()

    def put(self, store: Store) -> Image:
        """Make the image and put its blobs into the store, as foreign documents: not in our canonical form."""
        layers = [_put(store, *pair) for pair in zip(self.layers, self._compressions(), strict=True)]
        config = {
            "os": self.os, "architecture": self.architecture, "author": "somebody", "config": dict(self.process),
            "rootfs": {"type": "layers", "diff_ids": [str(layer.diff_id) for layer in layers]},
            "history": list(self.history), "created": "2020-01-01T00:00:00Z",
        }  # fmt: skip
        data = json.dumps(config, indent=1).encode()
        descriptors = [
            Descriptor(self.media_type or layer.media_type, layer.digest, layer.size).to_json() for layer in layers
        ]
        config_type = DOCKER_CONFIG if self.manifest_type == DOCKER_MANIFEST else CONFIG
        described = Descriptor(config_type, store.put(data), len(data)).to_json()
        manifest = {"schemaVersion": 2, "mediaType": self.manifest_type, "config": described, "layers": descriptors}
        document = json.dumps(manifest, indent=1).encode()
        store.put(document)
        return Image.from_documents(document, data)

    def _compressions(self) -> Sequence[Compression]:
        return self.compressions or [Compression.GZIP] * len(self.layers)


def _put(store: Store, entries: Sequence[Entry], compression: Compression) -> Layer:
    buffer = io.BytesIO()
    layer = write_layer(entries, buffer, compression)
    store.put(buffer.getvalue())
    return layer


def index_of(*images: tuple[Image, Mapping[str, str]], media_type: str) -> bytes:
    """Return an index of images with the platforms given."""
    entries = [image.descriptor.to_json() | {"platform": dict(platform)} for image, platform in images]
    return canonical_json({"schemaVersion": 2, "mediaType": media_type, "manifests": entries})
