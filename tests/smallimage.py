"""A real image of a few megabytes, made of this machine's own programs and the libraries they need."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder.oci.content import Bytes, FileBytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Symlink, write_layer
from envbuilder.oci.model import CONFIG, Config, Descriptor, History, Image, Layer, Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from envbuilder.store.store import Store

PROGRAMS = ("sh", "cat", "env", "id", "ls", "mkdir", "rm", "sleep", "touch", "true")
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def put_layer(store: Store, entries: Iterable[Entry]) -> Layer:
    buffer = io.BytesIO()
    layer = write_layer(entries, buffer)
    store.put(buffer.getvalue())
    return layer


def put_image(
    store: Store, name: str, layers: Iterable[Layer], *, cmd: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> Image:
    layers = tuple(layers)
    config = Config(
        architecture="amd64",
        created="1980-01-01T00:00:00Z",
        env={"PATH": "/usr/bin"} | dict(env or {}),
        labels={},
        diff_ids=tuple(layer.diff_id for layer in layers),
        history=tuple(History("a test") for _ in layers),
        cmd=cmd,
    )
    data = config.to_bytes()
    manifest = Manifest(Descriptor(CONFIG, Digest.of(data), len(data)), tuple(layer.descriptor for layer in layers))
    image = Image(manifest, config)
    store.put_image(image, name)
    return image


def small_image(store: Store, name: str = "small") -> Image:
    """Put an image into the store in which ``sh`` and a few other programs run."""
    system = put_layer(store, _programs())
    accounts: list[Entry] = [
        Directory("root", 0o700),
        Directory("tmp", 0o1777),
        File("etc/passwd", Bytes(b"root:x:0:0::/root:/bin/sh\nworker:x:1234:1234::/home/worker:/bin/sh\n")),
        File("etc/group", Bytes(b"root:x:0:\nworker:x:1234:\n")),
        File("usr/bin/not-executable", Bytes(b"text"), mode=0o644),
        Symlink("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
    ]
    greeting = {"GREETING": "hello from the image"}
    return put_image(store, name, [system, put_layer(store, accounts)], cmd=("sh", "-c", "exit 7"), env=greeting)


def _programs() -> Iterable[Entry]:
    libraries: set[str] = set()
    for name in PROGRAMS:
        path = Path(shutil.which(name) or "").resolve()
        yield File(f"usr/bin/{name}", FileBytes(path, path.stat().st_size), mode=0o755)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        libraries |= set(_LIBRARY.findall(listed))
    for library in sorted(libraries):
        path = Path(library)
        yield File(library.lstrip("/"), FileBytes(path, path.stat().st_size), mode=0o755)
    yield Symlink("bin", "usr/bin")
