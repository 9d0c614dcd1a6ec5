"""What is published next to an image: its lock and its SBOM, as OCI artifacts that refer to it.

Follows the guidance for artifacts of the OCI image specification 1.1: an empty configuration, the document as the only
layer, ``artifactType`` says what it is and ``subject`` whose it is. Everything is read from the image itself, so an
image that was pulled is published with the same artifacts as the one that was built.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder import report
from envbuilder.errors import EnvbuilderError, InputError
from envbuilder.images.assemble import SHARE
from envbuilder.images.cacheentry import EMPTY, EMPTY_CONTENT
from envbuilder.images.survey import overlay, survey
from envbuilder.lock import sbom
from envbuilder.lock.files import parse_lock
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import MANIFEST, Descriptor, ImageFormatError, canonical_json
from envbuilder.registry.client import open_repository
from envbuilder.registry.errors import RejectedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from envbuilder.images.survey import Tree
    from envbuilder.lock.model import Lock
    from envbuilder.oci.model import Config, Image
    from envbuilder.registry.client import Repository
    from envbuilder.registry.reference import Reference
    from envbuilder.store.store import Store

#: Artifact types; each is its document's media type too.
LOCK = "application/vnd.envbuilder.lock.v1+toml"
SBOM = sbom.MEDIA_TYPE
_LABEL, _BASE, _TITLE = "dev.envbuilder", "org.opencontainers.image.base", "org.opencontainers.image.title"
_OURS = "envbuilder: "
_MOST_BYTES = 64 << 20  # of a document that is read from a registry
_LOCK_FILE = re.compile(re.escape(SHARE) + r"/([^/]+)\.lock\.toml")
_INSTALLED = re.compile(r"(.+/)([^/-]+)-([^/-]+)\.dist-info/METADATA")
#: Layers of ours that hold something that no lock names; of the others, those that are not ours at all are looked into.
_LOOKED_INTO = re.compile(r"\S+ \S+, \d+ packages|extra .+|.+: metadata")


class ArtifactError(EnvbuilderError):
    """An artifact cannot be made or read: the image contradicts its labels, the registry has something else."""


@dataclass(frozen=True)
class Artifact:
    """A document that belongs to an image: its type, the name of the file that it would be, its bytes."""

    media_type: str
    file: str
    data: bytes

    @property
    def descriptor(self) -> Descriptor:
        """The document as the layer of its artifact."""
        return Descriptor(self.media_type, Digest.of(self.data), len(self.data), {_TITLE: self.file})


def artifact_manifest(artifact: Artifact, subject: Descriptor, created: str) -> bytes:
    """Return the manifest of an artifact of the image ``subject``; ``created`` is RFC 3339."""
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": artifact.media_type,
            "config": EMPTY.to_json(),
            "layers": [artifact.descriptor.to_json()],
            "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
            "annotations": {"org.opencontainers.image.created": created},
        }
    )


def artifacts_of(image: Image, store: Store) -> tuple[Artifact, ...]:
    """Return the image's lock and SBOM; none when it is not an environment's image.

    Raises:
        ArtifactError: its layers are not what its labels say.
        NotInStoreError: a layer is not in the store.

    """
    name = image.config.labels.get(f"{_LABEL}.environment")
    if name is None:
        return ()
    tree = _look(image, store)
    text = tree.found.get(f"{SHARE}/{name}.lock.toml")
    if text is None or str(Digest.of(text.encode())) != image.config.labels.get(f"{_LABEL}.lock"):
        raise ArtifactError(f"the image {image.digest} does not hold the lock of {name} that its labels name")
    return (
        Artifact(LOCK, f"{name}.lock.toml", text.encode()),
        Artifact(SBOM, f"{name}.cdx.json", _sbom(name, image, tree)),
    )


def publish_artifacts(image: Image, store: Store, reference: Reference) -> tuple[Descriptor, ...]:
    """Publish lock and SBOM of an image that is in the repository already; return the manifests that refer to it.

    What is there already is not sent again. A registry that takes no artifacts is a warning: the image is there.

    Raises:
        ArtifactError, NotInStoreError: see ``artifacts_of``.
        RegistryError: the registry does not answer, or wants other credentials.

    """
    artifacts = artifacts_of(image, store)
    if not artifacts:
        return ()
    try:
        return _publish(artifacts, image, open_repository(reference, push=True))
    except RejectedError as error:
        report.warning(f"lock and SBOM are not published next to the image: {error.message}")
        return ()


def _publish(artifacts: Sequence[Artifact], image: Image, repository: Repository) -> tuple[Descriptor, ...]:
    # Not whether the manifest is there: without the referrers API one may be there and in no list, after a break.
    there = {descriptor.digest for descriptor in repository.referrers(image.digest)}

    def publish(artifact: Artifact) -> Descriptor:
        data = artifact_manifest(artifact, image.descriptor, image.config.created)
        descriptor = Descriptor(MANIFEST, Digest.of(data), len(data))
        if descriptor.digest not in there:
            _put_blob(repository, EMPTY.digest, EMPTY_CONTENT)
            _put_blob(repository, artifact.descriptor.digest, artifact.data)
            repository.put_manifest(data, MANIFEST, str(descriptor.digest))
        return descriptor

    # One after the other: registries without the referrers API keep all of an image's in one index.
    return tuple(publish(artifact) for artifact in artifacts)


def fetch_artifact(repository: Repository, image: Digest, media_type: str) -> bytes:
    """Return the document of a type that refers to an image.

    Raises:
        InputError: there is none.
        ArtifactError: what refers to it is not an artifact of ours.
        RegistryError: the registry does not answer, or refuses.

    """
    found = repository.referrers(image, media_type)
    if not found:
        raise InputError(
            f"{repository.name}@{image} has no {media_type} next to it",
            hint="`envbuilder push` publishes lock and SBOM of an environment's image",
        )
    data = repository.manifest(str(found[-1].digest)).data
    try:
        document = json.loads(data)
        (layer,) = (Descriptor.from_json(entry) for entry in document["layers"])
    except (KeyError, TypeError, ValueError, ImageFormatError) as error:
        raise ArtifactError(f"{repository.name}@{found[-1].digest} is not an artifact of one document") from error
    if layer.size > _MOST_BYTES:
        raise ArtifactError(f"{repository.name}@{found[-1].digest}: its document of {layer.size} bytes is too large")
    return repository.blob(layer.digest)


def _put_blob(repository: Repository, digest: Digest, data: bytes) -> None:
    if not repository.has_blob(digest):
        repository.put_blob(digest, len(data), lambda: io.BytesIO(data), lambda _: None)


# -- what an image consists of ------------------------------------------------------------------------------------


def _look(image: Image, store: Store) -> Tree:
    """Return what the layers hold that are not made of locked packages."""
    wanted = []
    rows = zip(image.manifest.layers, image.config.diff_ids, image.config.layer_history, strict=True)
    for layer, diff_id, history in rows:
        title = history.created_by.removeprefix(_OURS)
        if title == history.created_by or _LOOKED_INTO.fullmatch(title):
            wanted.append((layer, diff_id))
    return overlay(survey(store, wanted))


def _sbom(name: str, image: Image, tree: Tree) -> bytes:
    locks = [parse_lock(text, Path(m[0])) for path, text in sorted(tree.found.items()) if (m := _LOCK_FILE.match(path))]
    components = [*_system(tree), *_base(image.config), *_python(image.config), *_installed(tree, locks)]
    for lock in locks:
        components += sbom.package_components(lock)
    version = str(image.digest)
    subject = sbom.Component("container", name, version, sbom.purl("oci", name, version))
    return sbom.format_sbom(subject, components)


def _system(tree: Tree) -> Iterator[sbom.Component]:
    """Yield the distribution and its packages, as far as dpkg's database tells them."""
    release = tree.release
    distribution, version = release.get("ID", "linux"), release.get("VERSION_ID", "")
    if release:
        yield sbom.Component("operating-system", distribution, version, f"os:{distribution}-{version}".rstrip("-"))
    for path, text in sorted(tree.found.items()):
        for line in text.splitlines() if path.startswith("var/lib/dpkg/status") else ():
            package, own, architecture, source = line.split("\t")
            upstream = source.split(" ")[0] if source else ""
            facts = {"arch": architecture, "distro": f"{distribution}-{version}".rstrip("-"), "upstream": upstream}
            yield sbom.Component("library", package, own, sbom.purl(f"deb/{distribution}", package, own, facts))


def _base(config: Config) -> Iterator[sbom.Component]:
    name, digest = (config.labels.get(f"{_BASE}.{word}") for word in ("name", "digest"))
    if name and digest:
        repository = re.sub(r"(:[^/:@]+)?(@.*)?$", "", name)
        last = repository.rpartition("/")[2]
        yield sbom.Component("container", name, digest, sbom.purl("oci", last, digest, {"repository_url": repository}))


def _python(config: Config) -> Iterator[sbom.Component]:
    kind, _, version = config.labels.get(f"{_LABEL}.interpreter", "").partition(" ")
    stated = config.env.get("PYTHON_VERSION", "")
    if kind == "base" and stated.startswith(f"{version}."):  # the convention of Docker's `python` images
        version = stated
    if version:
        yield sbom.python_component(version)


def _installed(tree: Tree, locks: list[Lock]) -> Iterator[sbom.Component]:
    """Yield the Python packages that no lock names: those of extras and of the base."""
    known = {(p.name, p.version) for lock in locks for p in lock.packages}
    for path in sorted(tree.found):
        if match := _INSTALLED.fullmatch(path):
            package, version = re.sub(r"[-_.]+", "-", match[2]).lower(), match[3]
            if (package, version) not in known:
                where = {"location": f"/{match[1].rstrip('/')}"}
                reference = sbom.python_purl(package, version)
                yield sbom.Component("library", package, version, reference, properties=where)
