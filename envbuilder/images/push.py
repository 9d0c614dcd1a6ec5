"""Push an image of the store to a registry: what it lacks, each blob once, several at once.

Whether the registry has a blob is asked of the registry. One that another of its repositories is known to have is taken
over from there (cross-repository mount) instead of being sent. Everything that the manifest refers to is there before
the manifest is, and the tag moves last; a push that was broken off leaves what was sent, and the next one sends the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.errors import EnvbuilderError, InputError
from envbuilder.images.whereabouts import Whereabouts, note
from envbuilder.oci.digest import Digest
from envbuilder.registry.client import open_repository
from envbuilder.registry.errors import RegistryError
from envbuilder.store.store import NotInStoreError

if TYPE_CHECKING:
    from envbuilder.oci.model import Descriptor, Image
    from envbuilder.registry.client import Repository
    from envbuilder.registry.reference import Reference
    from envbuilder.store.store import Store

#: Blobs sent at once, several because one connection seldom fills a network; and asked about at once.
AT_ONCE, _QUESTIONS = 6, 8
#: Repositories that are asked to lend a blob before it is sent.
_SOURCES = 2


class BlobDamagedError(EnvbuilderError):
    """A blob was whole when it came into the store, and is not any more."""

    def __init__(self, digest: Digest, actual: Digest) -> None:
        super().__init__(
            f"{digest} in the store is damaged: its bytes have the digest {actual}",
            hint="run `envbuilder cache verify`, then build or pull the image again",
        )
        self.digest = digest


class Way(Enum):
    """How a repository comes to have a blob that is not sent."""

    MOUNTED = "mounted"
    PRESENT = "present"


@dataclass(frozen=True)
class Pushed:
    """What a push did: ``reference`` names the image by digest; the rest counts the bytes of its distinct blobs.

    ``sent`` went over the network, ``mounted`` the registry took over from another of its repositories, ``present``
    was there. The manifest, of a few kilobytes, counts as none of them.
    """

    reference: Reference
    sent: int
    mounted: int
    present: int


def push(image: Image, store: Store, reference: Reference) -> Pushed:
    """Let the registry have the image under the reference's tag (``latest`` if there is none) and under its digest.

    A layer may be absent from the store when the registry has it.

    Raises:
        NotInStoreError: neither the store nor the registry has some layer; nothing was sent.
        InputError: the reference names another digest than the image's.
        BlobDamagedError: a blob in the store is damaged, and the registry found that out.
        RegistryError: the registry refuses or is out of reach; what was sent is not sent again by the next push.

    """
    digest = image.digest
    if reference.digest not in {None, digest}:
        raise InputError(f"{reference} names another image than {digest}", hint="leave the digest off the reference")
    repository = open_repository(reference, push=True)
    repository.check()
    layers = {layer.digest: layer for layer in image.manifest.layers}
    blobs = [image.manifest.config, *sorted(layers.values(), key=lambda layer: -layer.size)]
    sender = _Sender(repository, reference, store, Whereabouts(store, reference.registry))
    found = list(zip(blobs, parallel.run_all(sender.find, blobs, workers=_QUESTIONS), strict=True))
    missing = [blob for blob, way in found if way is None]
    _send(image, missing, sender)
    _put_manifest(image, repository, reference)
    note(store, reference, [blob.digest for blob in blobs])
    named = replace(reference, tag=None, digest=digest)
    sent, mounted, present = (
        sum(blob.size for blob, its in found if its is way) for way in (None, Way.MOUNTED, Way.PRESENT)
    )
    return Pushed(named, sent, mounted, present)


def _send(image: Image, missing: list[Descriptor], sender: _Sender) -> None:
    """Send what the registry lacks, the configuration last; make sure before that all of it is there to be sent."""
    store, config = sender.store, image.manifest.config
    layers = [blob for blob in missing if blob.digest != config.digest]
    if absent := [layer for layer in layers if not store.has(layer.digest, layer.size)]:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise NotInStoreError(
            f"layer {absent[0].digest}{more} of the image {image.digest} is not in the store; nothing was sent",
            hint="build the image again, or pull it: `envbuilder build ENV`, `envbuilder pull REF`",
        )
    store.put(image.documents.config)
    with report.task(f"pushing to {sender.repository.name}", sum(blob.size for blob in missing)) as task:
        parallel.run_all(lambda layer: sender.send(layer, task), layers, workers=AT_ONCE)
        if config in missing:
            sender.send(config, task)


@dataclass(frozen=True)
class _Sender:
    """Brings blobs of the store into one repository."""

    repository: Repository
    reference: Reference
    store: Store
    whereabouts: Whereabouts

    def find(self, blob: Descriptor) -> Way | None:
        """Return how the repository comes to have the blob without sending it, or None."""
        parallel.checkpoint()
        if self.repository.has_blob(blob.digest):
            return Way.PRESENT
        for source in self.whereabouts.of(blob.digest, but=self.reference.repository)[:_SOURCES]:
            if self.repository.mount(blob.digest, source):
                report.detail(f"{blob.digest} taken over from {source}")
                return Way.MOUNTED
        return None

    def send(self, blob: Descriptor, task: report.Task) -> None:
        """Send a blob."""
        path = self.store.blob(blob.digest)
        report.detail(f"sending {blob.digest} ({blob.size} bytes)")
        try:
            self.repository.put_blob(blob.digest, blob.size, lambda: path.open("rb"), task.advance)
        except RegistryError as error:
            # The registry hashes what it gets. Was it right when it came in, and is not any more?
            if error.code == "DIGEST_INVALID" and (actual := Digest.of_file(path)) != blob.digest:
                raise BlobDamagedError(blob.digest, actual) from error
            raise


def _put_manifest(image: Image, repository: Repository, reference: Reference) -> None:
    """Let the tag stand for the image. A tag that does so already is left alone: it may be one that cannot be moved."""
    target = reference.tag or (str(image.digest) if reference.digest is not None else "latest")
    there = repository.resolve(target)
    if there is None or there.digest != image.digest:
        parallel.checkpoint()
        repository.put_manifest(image.documents.manifest, image.manifest.media_type, target)
