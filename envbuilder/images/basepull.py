"""Get an image from a registry to serve as a base: what a name stands for, for which platform, its layers.

Given by digest, a base that is in the store is asked of nobody. Given by tag, the registry is asked what the tag stands
for and nothing else; when it is out of reach, what the tag stood for the last time is used, with a warning. What speaks
to registries is imported when it is needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from envbuilder import report
from envbuilder.images.base import BaseUnfitError, check_layers, look_into
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import DOCKER_INDEX, INDEX, Image, ImageFormatError, Index, Manifest, Platform
from envbuilder.oci.platform import choose
from envbuilder.registry.reference import Reference

if TYPE_CHECKING:
    from envbuilder.images.base import PulledBase
    from envbuilder.registry.client import Repository
    from envbuilder.store.store import Store

#: What the store remembers of names: a tag's digest, and an index's manifest for a platform.
_TAG, _PLATFORM = "base-tag", "base-platform"
#: The lock's word for an architecture -> OCI's.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: An index may refer to an index; nobody does it more often.
_MOST_INDEXES = 3


@dataclass(frozen=True)
class _Origin:
    """Where a base comes from, and the store that is asked first."""

    reference: Reference
    store: Store

    @cached_property
    def repository(self) -> Repository:
        from envbuilder.registry.client import open_repository  # noqa: PLC0415 (see the module)

        return open_repository(self.reference)

    def digest(self) -> Digest:
        """Return what the reference stands for."""
        if self.reference.digest is not None:
            return self.reference.digest
        from envbuilder.registry.errors import NotInRegistryError, RegistryUnreachableError  # noqa: PLC0415 (see the module)

        key = str(self.reference)
        try:
            found = self.repository.resolve(self.reference.target)
        except RegistryUnreachableError as error:
            remembered = self.store.recall(_TAG, key)
            if not isinstance(remembered, str):
                raise
            report.warning(f"{error.message}; {key} is taken to be {remembered}, as the last time")
            return Digest.parse(remembered)
        if found is None:
            raise NotInRegistryError(
                f"{self.reference.name} has no image `{self.reference.target}`",
                hint="look for its tags in the registry",
            )
        self.store.remember(_TAG, key, str(found.digest))
        return found.digest

    def document(self, digest: Digest) -> bytes:
        """Return a manifest or index; it is in the store afterwards."""
        if not self.store.has(digest):
            self.store.put(self.repository.manifest(str(digest)).data)
        return self.store.read(digest)


def pull_base(text: str, architecture: str, store: Store) -> PulledBase:
    """Return the base that a reference names, for Linux on ``architecture`` (as locks write it); it is in the store.

    Raises:
        InputError: the text is no reference, or the registry has no such image.
        NoSuchPlatformError: none of its images is made for the platform.
        BaseUnfitError: the image is not made for the platform, or is none whose layers can be taken over.
        RegistryError: the registry does not answer, or refuses.

    """
    reference = Reference.parse(text)
    origin = _Origin(reference, store)
    digest = origin.digest()
    if reference.digest is None:
        report.step(f"the base {reference} is {digest}")
    platform = Platform("linux", ARCHITECTURES[architecture])
    image = _image(origin, _for_platform(origin, digest, platform), platform)
    if store.find_image(str(reference)) != image.digest:
        store.put_image(image, str(reference))  # so that it is kept as long as the name means it
    return look_into(str(reference), digest, image, architecture, store)


def _for_platform(origin: _Origin, digest: Digest, platform: Platform) -> bytes:
    """Return the manifest for the platform: the one given, or the one that an index has for it."""
    key = f"{digest} {platform}"
    known = origin.store.recall(_PLATFORM, key)
    if isinstance(known, str) and origin.store.has(Digest.parse(known)):
        return origin.document(Digest.parse(known))
    found = digest
    for _ in range(_MOST_INDEXES):
        document = origin.document(found)
        if _media_type(document, origin) not in {INDEX, DOCKER_INDEX}:
            origin.store.remember(_PLATFORM, key, str(found))
            return document
        found = choose(Index.from_bytes(document), platform, str(origin.reference)).digest
    raise ImageFormatError(f"{origin.reference} is an index of indexes, one in the other")


def _image(origin: _Origin, manifest: bytes, platform: Platform) -> Image:
    """Return the image with its layers in the store."""
    store, descriptor = origin.store, Manifest.from_bytes(manifest).config
    if not store.has(descriptor.digest):
        store.put(origin.repository.blob(descriptor.digest))
    config = store.read(descriptor.digest)
    try:
        found = Platform.from_json(json.loads(config))
    except (ValueError, AttributeError, RecursionError) as error:
        raise BaseUnfitError(f"{origin.reference} is not the image of a system: it has no configuration") from error
    if (found.os, found.architecture) != (platform.os, platform.architecture):
        raise BaseUnfitError(f"{origin.reference} is made for {found if str(found) else 'nothing'}, not for {platform}")
    image = Image.from_documents(manifest, config)
    check_layers(image, str(origin.reference))
    if any(not store.has(layer.digest) for layer in image.manifest.layers):
        from envbuilder.images.receive import Wanted, receive_all  # noqa: PLC0415 (see the module)

        pairs = zip(image.manifest.layers, image.config.diff_ids, strict=True)
        wanted = {layer.digest: Wanted(layer, diff_id) for layer, diff_id in pairs}
        receive_all(list(wanted.values()), origin.repository, store, unpack=False)
    return image


def _media_type(document: bytes, origin: _Origin) -> str:
    """Return what a document is, also when it leaves that to its structure; raise for Docker's first format."""
    try:
        read = json.loads(document)
        stated = str(read.get("mediaType") or (INDEX if "manifests" in read else ""))
        version = read.get("schemaVersion")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ImageFormatError(f"{origin.reference}: its manifest is not a JSON object") from error
    if version == 1:
        raise BaseUnfitError(
            f"{origin.reference} is of Docker's first format (schema 1), which cannot be read",
            hint="pull and push it with a current Docker or skopeo, which writes it anew",
        )
    return stated
