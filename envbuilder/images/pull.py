"""Pull an image from a registry into the store: the layers that are missing, several at once, unpacked while they come.

An index stands for its image for this machine. Manifest and configuration are kept byte for byte, so that the image has
the same digest here as in the registry, whoever made it. A layer is hashed while it comes, and continued by the next
run when this one breaks off. A tree that was unpacked from bytes not verified yet gets its name only when it is what the
configuration, which was verified, says; so does an image: its name is given last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envbuilder import report
from envbuilder.atomic import explain_full_disk
from envbuilder.errors import InputError
from envbuilder.images.receive import Wanted, receive_all
from envbuilder.images.whereabouts import note
from envbuilder.oci.model import (
    CONFIG,
    DOCKER_CONFIG,
    DOCKER_INDEX,
    DOCKER_MANIFEST,
    INDEX,
    MANIFEST,
    Image,
    Index,
    Manifest,
)
from envbuilder.oci.platform import choose, this_platform
from envbuilder.registry.client import open_repository

if TYPE_CHECKING:
    from envbuilder.oci.digest import Digest
    from envbuilder.registry.client import Fetched, Repository
    from envbuilder.registry.reference import Reference
    from envbuilder.store.store import Store

_ENVIRONMENT = "dev.envbuilder.environment"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:/@-]*")
#: What Docker's first format is called, signed or not.
_FIRST = "application/vnd.docker.distribution.manifest.v1+"
#: An index may refer to an index; nobody does it more often.
_MOST_INDEXES = 3


class NotAnImageError(InputError):
    """A reference leads to something else than an image: a chart, a signature, an image of Docker's first format."""


@dataclass(frozen=True)
class Pulled:
    """What a pull did: the image, the ``name`` that it has in the store, and its ``reference`` by digest.

    ``stated`` is what the given reference stood for: the image's digest, or that of an index which has it. ``received``
    and ``present`` count the bytes of its distinct blobs that came over the network and that were in the store.
    """

    image: Image
    name: str
    reference: Reference
    stated: Digest
    received: int
    present: int


def pull(reference: Reference, store: Store, *, name: str | None = None, unpack: bool = True) -> Pulled:
    """Bring an image into the store and give it a name there, by default that of ``default_name``.

    Raises:
        NotInRegistryError: there is no such image.
        InputError: the name is none.
        NotAnImageError, NoSuchPlatformError, ImageFormatError: what is there is not an image for this machine.
        WrongBytesError: a blob is not what the manifest says; nothing of it was kept.
        UnpackError: a layer is damaged, or holds what must not be unpacked.
        RegistryError, DiskFullError: as their names say; what has arrived is not asked for again by the next pull.

    """
    if name is not None and not _NAME.fullmatch(name):
        raise InputError(f"`{name}` is no name for an image", hint="use letters, digits and `.`, `_`, `+`, `-`")
    repository = open_repository(reference)
    stated, found = _resolve(repository, reference)
    with explain_full_disk(store.root):
        image, config_received = _image(found, repository, store)
        _check_platform(image, reference)
        pairs = zip(image.manifest.layers, image.config.diff_ids, strict=True)
        layers = {layer.digest: Wanted(layer, diff_id) for layer, diff_id in pairs}
        received = config_received + receive_all(list(layers.values()), repository, store, unpack=unpack)
        name = name or default_name(image, reference)
        before = store.find_image(name)
        store.put_image(image, name)
    if before not in {None, image.digest}:
        report.step(f"`{name}` was {before} until now")
    blobs = [image.manifest.config, *(wanted.layer for wanted in layers.values())]
    note(store, reference, [blob.digest for blob in blobs])
    named = replace(reference, tag=None, digest=image.digest)
    return Pulled(image, name, named, stated, received, sum(blob.size for blob in blobs) - received)


def default_name(image: Image, reference: Reference) -> str:
    """Return what an image is called in the store: after its environment when it is one of ours, else its repository."""
    environment = image.config.labels.get(_ENVIRONMENT, "")
    return environment if _NAME.fullmatch(environment) else reference.repository.rpartition("/")[2]


def _resolve(repository: Repository, reference: Reference) -> tuple[Digest, Fetched]:
    """Return the digest that a reference stands for, and the manifest that it has for this machine."""
    found = repository.manifest(reference.target)
    stated = found.descriptor.digest
    for _ in range(_MOST_INDEXES):
        media_type = found.descriptor.media_type
        if media_type in {MANIFEST, DOCKER_MANIFEST}:
            return stated, found
        if media_type not in {INDEX, DOCKER_INDEX}:
            break
        chosen = choose(Index.from_bytes(found.data), this_platform(), str(reference))
        report.detail(f"{reference} has {chosen.digest} for {chosen.platform}")
        found = repository.manifest(str(chosen.digest))
    kind = found.descriptor.media_type
    anew = "pull and push it with a current Docker or skopeo, which writes it anew" if kind.startswith(_FIRST) else None
    raise NotAnImageError(f"{reference} is not an image that can be pulled: its type is `{kind}`", hint=anew)


def _image(found: Fetched, repository: Repository, store: Store) -> tuple[Image, int]:
    """Return the image with its configuration, and how many bytes of that came over the network."""
    config = Manifest.from_bytes(found.data).config
    if config.media_type not in {CONFIG, DOCKER_CONFIG}:
        raise NotAnImageError(f"{repository.name} has no image there, but something else: `{config.media_type}`")
    if store.has(config.digest, config.size):
        return Image.from_documents(found.data, store.read(config.digest)), 0
    return Image.from_documents(found.data, repository.blob(config.digest)), config.size


def _check_platform(image: Image, reference: Reference) -> None:
    """Warn of an image that is stated to be for another machine: it can be kept and pushed, if not run."""
    here = this_platform().architecture
    if image.config.architecture != here:
        report.warning(f"{reference} is made for {image.config.architecture}, and this machine is {here}")
