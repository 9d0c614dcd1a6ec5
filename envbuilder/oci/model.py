"""Descriptors, image configuration, manifest and index as frozen dataclasses, and their canonical JSON.

Canonical means: keys sorted, no white space, UTF-8. The same value gives the same bytes and so the same digest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
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
#: The same documents as Docker's own formats name them (image manifest version 2, schema 2).
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
#: On a layer's descriptor: the digest of its eStargz table of contents (``oci.toc``).
TOC_DIGEST = "containerd.io/snapshot/stargz/toc.digest"


class ImageFormatError(EnvbuilderError):
    """Bytes that should be an OCI document are not one."""


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON of a value built from dicts, lists, strings and numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class Platform:
    """What an image runs on, as an index states it: ``linux``, ``amd64`` or ``arm64``, perhaps a variant (``v8``)."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)

    def to_json(self) -> dict[str, str]:
        """Return the JSON object of the specification."""
        own = {"os": self.os, "architecture": self.architecture}
        return own | ({"variant": self.variant} if self.variant else {})

    @classmethod
    def from_json(cls, document: Any) -> Platform:
        """Read the JSON object, in which every field may be missing."""
        return cls(*(str(document.get(key) or "") for key in ("os", "architecture", "variant")))


@dataclass(frozen=True)
class Descriptor:
    """Points at content: media type, digest, size in bytes, annotations; in an index the platform of an image, or what an artifact is."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: Platform | None = None
    artifact_type: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the specification."""
        document: dict[str, Any] = {"mediaType": self.media_type, "digest": str(self.digest), "size": self.size}
        if self.artifact_type:
            document["artifactType"] = self.artifact_type
        if self.annotations:
            document["annotations"] = dict(self.annotations)
        if self.platform is not None:
            document["platform"] = self.platform.to_json()
        return document

    @classmethod
    def from_json(cls, document: Any) -> Descriptor:
        """Read the JSON object; raise ImageFormatError when a field is missing or of the wrong type."""
        try:
            platform = document.get("platform")
            if int(document["size"]) < 0:
                raise ImageFormatError("an OCI descriptor states a negative size")
            return cls(
                str(document["mediaType"]),
                Digest.parse(document["digest"]),
                int(document["size"]),
                dict(document.get("annotations") or {}),
                Platform.from_json(platform) if platform is not None else None,
                str(document.get("artifactType") or ""),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
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
    """One entry of the image's history: what made a layer, or what changed nothing but the configuration (``empty``).

    ``created`` is RFC 3339; "" stands for when the image was created.
    """

    created_by: str
    comment: str = ""
    created: str = ""
    empty: bool = False


@dataclass(frozen=True)
class Config:
    """An image configuration. ``created`` is RFC 3339; ``env`` maps names to values; ``history`` is from the base up."""

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

    @property
    def layer_history(self) -> tuple[History, ...]:
        """One entry for each layer; empty ones where the history does not say which made what."""
        made = tuple(entry for entry in self.history if not entry.empty)
        return made if len(made) == len(self.diff_ids) else (History(""),) * len(self.diff_ids)

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
            {"created": h.created or self.created, "created_by": h.created_by}
            | ({"comment": h.comment} if h.comment else {})
            | ({"empty_layer": True} if h.empty else {})
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
                history=tuple(_history(h, document.get("created") or "") for h in document.get("history") or []),
                user=process.get("User") or "",
                working_dir=process.get("WorkingDir") or "",
                entrypoint=tuple(process.get("Entrypoint") or ()),
                cmd=tuple(process.get("Cmd") or ()),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ImageFormatError(f"not an OCI image configuration: {error!r}") from error


def _history(document: Any, created: str) -> History:
    own = str(document.get("created") or "")
    return History(
        str(document.get("created_by") or ""),
        str(document.get("comment") or ""),
        own if own != created else "",
        bool(document.get("empty_layer")),
    )


@dataclass(frozen=True)
class Manifest:
    """An image manifest: one configuration, layers from the base up, annotations; OCI's, or Docker's equal one."""

    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    media_type: str = MANIFEST

    def to_bytes(self) -> bytes:
        """Return the canonical JSON document, whose digest is the image's."""
        document: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": self.media_type,
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
                str(document.get("mediaType") or MANIFEST),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ImageFormatError(f"not an OCI image manifest: {error!r}") from error


@dataclass(frozen=True)
class Index:
    """An index: images of one name, one for each platform (OCI's, or Docker's manifest list)."""

    manifests: tuple[Descriptor, ...]

    @classmethod
    def from_bytes(cls, data: bytes) -> Index:
        """Read an index document; raise ImageFormatError when it is not one."""
        try:
            return cls(tuple(Descriptor.from_json(entry) for entry in json.loads(data)["manifests"]))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ImageFormatError(f"not an OCI image index: {error!r}") from error


@dataclass(frozen=True)
class Documents:
    """An image's manifest and configuration as they were written, byte for byte."""

    manifest: bytes
    config: bytes


@dataclass(frozen=True)
class Image:
    """A manifest with its configuration; ``descriptor.digest`` is the image's digest.

    ``received`` has the documents of an image that somebody else wrote, with fields that we do not know and in another
    form than the canonical one: they, and not what we understood of them, are stored, pushed and hashed.
    """

    manifest: Manifest
    config: Config
    received: Documents | None = None

    @classmethod
    def from_documents(cls, manifest: bytes, config: bytes) -> Image:
        """Read an image from its two documents.

        Raises:
            ImageFormatError: they are not those of an image, or do not belong together.

        """
        image = cls(Manifest.from_bytes(manifest), Config.from_bytes(config))
        if image.manifest.config.digest != Digest.of(config):
            raise ImageFormatError(f"the manifest's configuration is {image.manifest.config.digest}, not this one")
        layers, diff_ids = len(image.manifest.layers), len(image.config.diff_ids)
        if layers != diff_ids:
            raise ImageFormatError(f"the manifest has {layers} layers, but the configuration has {diff_ids}")
        given = Documents(manifest, config)
        return image if image.documents == given else replace(image, received=given)

    @property
    def documents(self) -> Documents:
        """Manifest and configuration as bytes."""
        return self.received or Documents(self.manifest.to_bytes(), self.config.to_bytes())

    @property
    def descriptor(self) -> Descriptor:
        """The image as it stands in an index."""
        data = self.documents.manifest
        return Descriptor(self.manifest.media_type, Digest.of(data), len(data))

    @property
    def digest(self) -> Digest:
        """The image's digest."""
        return self.descriptor.digest
