"""Write an image as an OCI image layout, a folder that skopeo, podman and containerd read."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from envbuilder.atomic import atomic_file, atomic_folder
from envbuilder.errors import InputError
from envbuilder.oci.model import INDEX, Descriptor, canonical_json

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Image
    from envbuilder.store.store import Store


def write_layout(image: Image, store: Store, folder: Path, name: str) -> None:
    """Write the image to ``folder``, which must not exist; blobs are hard links where that is possible.

    Follows the OCI image layout specification 1.0.0. ``name`` becomes org.opencontainers.image.ref.name.

    Raises:
        InputError: the folder exists.
        DiskFullError: no room; nothing is left behind.

    """
    if folder.exists():
        raise InputError(f"{folder} exists already", hint="give a folder that does not exist yet")
    described = image.descriptor
    named = Descriptor(
        described.media_type, described.digest, described.size, {"org.opencontainers.image.ref.name": name}
    )
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [named.to_json()]}
    manifest = image.manifest
    digests = [described.digest, manifest.config.digest, *(layer.digest for layer in manifest.layers)]
    with atomic_folder(folder) as temporary:
        blobs = temporary / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for digest in dict.fromkeys(digests):
            _place(store, digest, blobs / digest.hex)
        for file, data in (("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'), ("index.json", canonical_json(index))):
            with atomic_file(temporary / file) as out:
                out.write(data)
        temporary.chmod(0o755)


def _place(store: Store, digest: Digest, target: Path) -> None:
    source = store.blob(digest)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
