"""What the tests of push and pull share: small images of random files, and how they are put into a registry."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from envbuilder.images.push import push
from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import Directory, File
from envbuilder.registry.reference import Reference
from tests.smallimage import put_image, put_layer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from envbuilder.oci.model import Image, Layer
    from envbuilder.store.store import Store
    from tests.registries import FakeRegistry

SIZE = 120_000


def layer(store: Store, name: str, size: int = SIZE) -> Layer:
    """Put a layer into the store with files of about ``size`` bytes that do not compress; equal names, equal layers."""
    dice = random.Random(name)  # noqa: S311 (no secret)
    files = (File(f"{name}/{number}.bin", Bytes(dice.randbytes(size // 4))) for number in range(4))
    return put_layer(store, [Directory(name), *files])


def image(store: Store, name: str, parts: Iterable[str]) -> Image:
    """Put an image of such layers into the store."""
    return put_image(store, name, [layer(store, part) for part in parts], cmd=("true",))


def push_to(registry: FakeRegistry, repository: str, made: Image, store: Store, tag: str = "v1") -> Reference:
    """Push an image and return its reference by tag."""
    reference = Reference.parse(registry.reference(repository, tag))
    push(made, store, reference)
    return reference


def uploaded(registry: FakeRegistry, repository: str) -> int:
    """Return the bytes of all requests so far that carry parts of blobs into a repository."""
    requests = [seen for seen in list(registry.requests) if seen.path.startswith(f"/v2/{repository}/blobs/uploads/")]
    return sum(int(seen.headers.get("content-length", 0)) for seen in requests)


def fetched(registry: FakeRegistry, repository: str) -> list[str]:
    """Return the digests that were read as blobs, one for each request."""
    return [line.rpartition("/")[2] for line in registry.lines(f"GET /v2/{repository}/blobs/*")]
