"""Descriptors, image configuration, manifest and index as frozen dataclasses, and their canonical JSON.

Canonical means: keys sorted, no white space, UTF-8. The same value gives the same bytes and so the same digest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER_TAR = "application/vnd.oci.image.layer.v1.tar"
LAYER_GZIP = f"{LAYER_TAR}+gzip"
LAYER_ZSTD = f"{LAYER_TAR}+zstd"
#: On a layer's descriptor: the digest of its eStargz table of contents (``oci.toc``).
TOC_DIGEST = "containerd.io/snapshot/stargz/toc.digest"


class ImageFormatError(EnvbuilderError):
    """Bytes that should be an OCI document are not one."""


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON of a value built from dicts, lists, strings and numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class Descriptor:
    """Points at content: media type, digest, size in bytes, annotations."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the specification."""
        document: dict[str, Any] = {"mediaType": self.media_type, "digest": str(self.digest), "size": self.size}
        if self.annotations:
            document["annotations"] = dict(self.annotations)
        return document

    @classmethod
    def from_json(cls, document: Any) -> Descriptor:
        """Read the JSON object; raise ImageFormatError when a field is missing or of the wrong type."""
        try:
            return cls(
                str(document["mediaType"]),
                Digest.parse(document["digest"]),
                int(document["size"]),
                dict(document.get("annotations") or {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ImageFormatError(f"not an OCI descriptor: {error!r}") from error


@dataclass(frozen=True)
class Layer:
    """A layer: what a manifest (digest, size, media type) and a configuration (diff id) say about it.

    ``tar_size`` is the size of the uncompressed tar, ``toc`` the digest of the table of contents when it has one. The
    bytes lie in the store under ``digest``.
    """

    digest: Digest
    size: int
    diff_id: Digest
    tar_size: int
    media_type: str = LAYER_GZIP
    toc: Digest | None = None

    @property
    def descriptor(self) -> Descriptor:
        """The layer as it stands in a manifest."""
        annotations = {TOC_DIGEST: str(self.toc)} if self.toc is not None else {}
        return Descriptor(self.media_type, self.digest, self.size, annotations)

    def to_json(self) -> dict[str, Any]:
        """Return what is remembered of a layer."""
        return {
            "digest": str(self.digest),
            "size": self.size,
            "diffId": str(self.diff_id),
            "tarSize": self.tar_size,
            "mediaType": self.media_type,
            "toc": str(self.toc) if self.toc is not None else None,
        }

    @classmethod
    def from_json(cls, document: Any) -> Layer:
        """Read what was remembered; raise ImageFormatError when it is not a layer's."""
        try:
            toc = document["toc"]
            return cls(
                digest=Digest.parse(document["digest"]),
                size=int(document["size"]),
                diff_id=Digest.parse(document["diffId"]),
                tar_size=int(document["tarSize"]),
                media_type=str(document["mediaType"]),
                toc=Digest.parse(toc) if toc is not None else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ImageFormatError(f"not a layer's record: {error!r}") from error


@dataclass(frozen=True)
class History:
    """One entry of the image's history: what made a layer."""

    created_by: str
    comment: str = ""


@dataclass(frozen=True)
class Config:
    """An image configuration. ``created`` is RFC 3339; ``env`` maps names to values; one history entry per layer."""

    architecture: str
    created: str
    env: Mapping[str, str]
    labels: Mapping[str, str]
    diff_ids: tuple[Digest, ...]
    history: tuple[History, ...]
    user: str = ""
    working_dir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the canonical JSON document."""
        process: dict[str, Any] = {
            "Env": [f"{name}={value}" for name, value in sorted(self.env.items())],
            "Labels": dict(self.labels),
        }
        optional = {"User": self.user, "WorkingDir": self.working_dir}
        process |= {key: value for key, value in optional.items() if value}
        words = {"Entrypoint": list(self.entrypoint), "Cmd": list(self.cmd)}
        process |= {key: value for key, value in words.items() if value}
        history = [
            {"created": self.created, "created_by": h.created_by} | ({"comment": h.comment} if h.comment else {})
            for h in self.history
        ]
        return canonical_json(
            {
                "architecture": self.architecture,
                "config": process,
                "created": self.created,
                "history": history,
                "os": "linux",
                "rootfs": {"type": "layers", "diff_ids": [str(d) for d in self.diff_ids]},
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Config:
        """Read a configuration document, ours or foreign; raise ImageFormatError when it is not one."""
        try:
            document = json.loads(data)
            process = document.get("config") or {}
            return cls(
                architecture=document["architecture"],
                created=document.get("created") or "",
                env=dict(entry.partition("=")[::2] for entry in process.get("Env") or []),
                labels=dict(process.get("Labels") or {}),
                diff_ids=tuple(Digest.parse(d) for d in document["rootfs"]["diff_ids"]),
                history=tuple(
                    History(h.get("created_by", ""), h.get("comment", "")) for h in document.get("history") or []
                ),
                user=process.get("User") or "",
                working_dir=process.get("WorkingDir") or "",
                entrypoint=tuple(process.get("Entrypoint") or ()),
                cmd=tuple(process.get("Cmd") or ()),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ImageFormatError(f"not an OCI image configuration: {error!r}") from error


@dataclass(frozen=True)
class Manifest:
    """An image manifest: one configuration, layers from the base up, annotations."""

    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON document, whose digest is the image's."""
        document: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.config.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
        }
        if self.annotations:
            document["annotations"] = dict(self.annotations)
        return canonical_json(document)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest document; raise ImageFormatError when it is not one."""
        try:
            document = json.loads(data)
            return cls(
                Descriptor.from_json(document["config"]),
                tuple(Descriptor.from_json(layer) for layer in document["layers"]),
                dict(document.get("annotations") or {}),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ImageFormatError(f"not an OCI image manifest: {error!r}") from error


@dataclass(frozen=True)
class Image:
    """A manifest with its configuration; ``descriptor.digest`` is the image's digest."""

    manifest: Manifest
    config: Config

    @property
    def descriptor(self) -> Descriptor:
        """The image as it stands in an index."""
        data = self.manifest.to_bytes()
        return Descriptor(MANIFEST, Digest.of(data), len(data))

    @property
    def digest(self) -> Digest:
        """The image's digest."""
        return self.descriptor.digest
