"""Put an image of the store into a container engine on this host.

What is sent is a tar that is an OCI layout and an archive of ``docker save`` at once, so that every version of Docker
finds the form it reads. It is made while it is sent: no second copy of the layers is written on our side.
"""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
from docker.errors import DockerException, ImageLoadError, ImageNotFound

from envbuilder import parallel, report
from envbuilder.errors import HostError, InputError, did_you_mean
from envbuilder.oci.model import INDEX, Descriptor, canonical_json
from envbuilder.store.store import NotInStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Image
    from envbuilder.store.store import Store

_CHUNK = 1 << 20
_NO_LIMIT: Any = None  # the engine is silent while it unpacks gigabytes; the stubs know no such client
_HINTS = {
    "docker": "start it (`systemctl start docker`), or name another with DOCKER_HOST",
    "podman": "start its service: `systemctl --user start podman.socket`",
}


def reference(name: str, digest: Digest) -> str:
    """Return how the image is called in an engine, ``envbuilder/<name>:<12 digits of the digest>``.

    The tag is taken from the digest: equal tags mean equal images.
    """
    repository = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"envbuilder/{repository}:{digest.hex[:12]}"


def load(image: Image, store: Store, engine: str, name: str) -> str:
    """Make sure that ``engine`` has the image, and return the reference for ``docker run``; see ``reference``.

    Nothing is sent when the engine has it already.

    Raises:
        InputError: there is no such engine.
        HostError: the engine is not reachable, or does not take the image.
        NotInStoreError: a layer is not in the store.

    """
    tag = reference(name, image.digest)
    try:
        client = _connect(engine)
        try:
            if not _has(client, tag, image):
                report.step(f"loading `{tag}` into {engine}")
                _send(client, store, image, tag)
        finally:
            client.close()
    except ImageLoadError as error:
        raise HostError(f"the {engine} engine does not take the image: {error}") from error
    except DockerException as error:
        raise HostError(f"the {engine} engine cannot be used: {error}", hint=_HINTS[engine]) from error
    return tag


def archive(store: Store, image: Image, tag: str) -> Iterator[bytes]:
    """Yield the tar in pieces of at most about a megabyte. The same image and tag give the same bytes.

    Raises:
        NotInStoreError: a blob is not in the store.

    """
    for folder in ("blobs", "blobs/sha256"):  # stated, so that skopeo can unpack it without being root
        yield _header(folder, 0, tarfile.DIRTYPE)
    for name, data in _documents(image, tag):
        yield _header(name, len(data)) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
    for layer in {layer.digest: layer for layer in image.manifest.layers}.values():
        yield _header(_path(layer.digest), layer.size)
        try:
            with store.blob(layer.digest).open("rb") as file:
                while data := file.read(_CHUNK):
                    parallel.checkpoint()
                    yield data
        except FileNotFoundError as error:
            raise NotInStoreError(f"layer {layer.digest} of `{tag}` is not in the store") from error
        yield bytes(-layer.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _documents(image: Image, tag: str) -> Iterator[tuple[str, bytes]]:
    own = image.descriptor
    named = {
        "io.containerd.image.name": f"docker.io/{tag}",
        "org.opencontainers.image.ref.name": tag.rpartition(":")[2],
    }
    entry = Descriptor(own.media_type, own.digest, own.size, named)
    index: dict[str, Any] = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry.to_json()]}
    saved = {
        "Config": _path(image.manifest.config.digest),
        "RepoTags": [tag],
        "Layers": [_path(layer.digest) for layer in image.manifest.layers],
    }
    yield "oci-layout", b'{"imageLayoutVersion":"1.0.0"}'
    yield "index.json", canonical_json(index)
    yield "manifest.json", canonical_json([saved])
    yield _path(own.digest), image.documents.manifest
    yield _path(image.manifest.config.digest), image.documents.config


def _path(digest: Digest) -> str:
    return f"blobs/sha256/{digest.hex}"


def _header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.mode = size, kind, 0o755 if kind == tarfile.DIRTYPE else 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _connect(engine: str) -> docker.DockerClient:
    if engine not in _HINTS:
        raise InputError(f"images cannot be loaded into `{engine}`", hint=did_you_mean(engine, _HINTS))
    environment = dict(os.environ)
    if engine == "podman":
        own = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}"), "podman", "podman.sock")
        default = own if own.exists() else Path("/run/podman/podman.sock")
        environment["DOCKER_HOST"] = os.environ.get("CONTAINER_HOST", f"unix://{default}")
    return docker.from_env(timeout=_NO_LIMIT, environment=environment)


def _has(client: docker.DockerClient, tag: str, image: Image) -> bool:
    """Return whether ``tag`` is this image; a containerd store names images by manifest, the others by configuration."""
    try:
        found = client.images.get(tag)
    except ImageNotFound:
        return False
    identity = str(found.id).removeprefix("sha256:")
    return identity in {image.manifest.config.digest.hex, image.digest.hex}


def _send(client: docker.DockerClient, store: Store, image: Image, tag: str) -> None:
    with report.task(f"loading {tag}", sum(layer.size for layer in image.manifest.layers)) as task:

        def counted() -> Iterator[bytes]:
            for piece in archive(store, image, tag):
                yield piece
                task.advance(len(piece))

        client.images.load(counted())  # type: ignore[arg-type]  # sent in pieces as they come
    if not _has(client, tag, image):
        raise ImageLoadError(f"`{tag}` is not there after loading it")
