"""An image of any registry as the base of ours: resolved for the platform, pulled into the store, and looked into.

The base's layers are taken over as they are. Docker's media types for them are written as OCI's, which name the same
bytes, so that the manifest is of one kind. Whether the base fits (system, architecture, glibc, Python) is read from its
layers without unpacking them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from envbuilder.errors import HostError
from envbuilder.images.survey import overlay, survey
from envbuilder.oci.model import LAYER_GZIP, LAYER_TAR, LAYER_ZSTD
from envbuilder.system.pythons import OwnPython

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envbuilder.images.survey import Tree
    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Descriptor, History, Image
    from envbuilder.store.store import Store

#: A layer's media types, and OCI's word for the same.
LAYER_TYPES = {
    LAYER_TAR: LAYER_TAR,
    LAYER_GZIP: LAYER_GZIP,
    LAYER_ZSTD: LAYER_ZSTD,
    "application/vnd.docker.image.rootfs.diff.tar": LAYER_TAR,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": LAYER_GZIP,
    "application/vnd.docker.image.rootfs.diff.tar.zstd": LAYER_ZSTD,
}
#: Variables of a base that would lead our Python to packages of the base.
LEADING_ASTRAY = ("PYTHONHOME", "PYTHONPATH", "PYTHONPLATLIBDIR")
#: Where distributions keep the certificates of authorities in one file; the first is Debian's.
CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)  # fmt: skip
#: As many layers as Docker stacks (`maxLayerDepth` in its layer store).
MOST_LAYERS = 125
#: PATH where an image sets none, as engines have it.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MUSL = re.compile(r"(?:.+/)?ld-musl-[^/]+")
_PYTHON = re.compile(r"(?:.+/)?bin/python(\d\.\d+)")
#: Where the loader looks without being told.
_LIBRARIES = ("lib/{0}-linux-gnu", "usr/lib/{0}-linux-gnu", "lib64", "usr/lib64", "lib", "usr/lib")
#: What wheels expect of the system (the manylinux policies), and what brings it on Debian.
_EXPECTED = {"libstdc++.so.6": "libstdc++6", "libgcc_s.so.1": "libgcc-s1", "libz.so.1": "zlib1g"}


class BaseUnfitError(HostError):
    """An image cannot be the base of the environment: another system, an old glibc, no Python. Exit code 4."""


@dataclass(frozen=True)
class PulledBase:
    """A base that lies in the store. ``name`` is its reference in full; ``digest`` what that stood for, or was given as.

    ``digest`` is an index's when the name is one of several platforms. ``architecture`` is written as locks do.
    """

    name: str
    digest: Digest
    image: Image
    architecture: str
    tree: Tree

    @cached_property
    def release(self) -> Mapping[str, str]:
        """What ``os-release`` says; empty when there is none."""
        return self.tree.release

    @property
    def distribution(self) -> str:
        """The distribution's identifier, ``debian``."""
        return self.release.get("ID") or "unknown"

    @property
    def suite(self) -> str:
        """The distribution's release: a code name where it has one (``bookworm``), else a number."""
        return self.release.get("VERSION_CODENAME") or self.release.get("VERSION_ID") or "unknown"

    @cached_property
    def glibc(self) -> str | None:
        """The version of glibc that programs of the architecture find (``2.36``); "" if unknown, None without glibc."""
        texts = [self.tree.read(f"{folder.format(self.architecture)}/libc.so.6") for folder in _LIBRARIES]
        found = [text.partition(" ") for text in texts if text is not None]
        own = [version for machine, _, version in found if machine in {self.architecture, ""}]
        return min(own, key=numbers) if own else None

    @cached_property
    def layers(self) -> tuple[Descriptor, ...]:
        """The layers as they stand in the manifest of an image on top."""
        return tuple(replace(d, media_type=LAYER_TYPES[d.media_type]) for d in self.image.manifest.layers)

    @cached_property
    def history(self) -> tuple[History, ...]:
        """The history that an image on top takes over: one entry for each layer, and those that made none."""
        config = self.image.config
        made = sum(not entry.empty for entry in config.history)
        own = config.history if made == len(config.diff_ids) else config.layer_history
        return tuple(replace(entry, created=entry.created or config.created) for entry in own)

    @property
    def env(self) -> Mapping[str, str]:
        """The variables that an image on top takes over."""
        return {name: value for name, value in self.image.config.env.items() if name not in LEADING_ASTRAY}

    @property
    def path(self) -> str:
        """The PATH of the base, or what engines set where it has none."""
        return self.image.config.env.get("PATH") or DEFAULT_PATH

    @property
    def certificates(self) -> str | None:
        """Where the base keeps the certificates of authorities; None when it has none where they are looked for."""
        return next((path for path in CERTIFICATES if self.tree.read(path) is not None), None)

    def python(self, minor: str) -> OwnPython:
        """Return the base's own Python of a minor version; see ``own_python``."""
        return own_python(self.tree, self.path, minor, self.name)


def check_layers(image: Image, name: str) -> None:
    """Raise BaseUnfitError when a layer is of a kind that cannot be taken over; ``name`` is what the image is called."""
    for layer in image.manifest.layers:
        if layer.media_type not in LAYER_TYPES:
            raise BaseUnfitError(
                f"{name} has a layer of the kind `{layer.media_type}`, which cannot be taken over",
                hint="layers that registries do not hand out, and encrypted ones, have to be made into plain ones first",
            )


def look_into(name: str, digest: Digest, image: Image, architecture: str, store: Store) -> PulledBase:
    """Return an image of the store as a base, its layers read; ``architecture`` is the lock's.

    Raises:
        UnpackError: a layer is damaged, or is not what the configuration says.

    """
    pairs = list(zip(image.manifest.layers, image.config.diff_ids, strict=True))
    return PulledBase(name, digest, image, architecture, overlay(survey(store, pairs)))


def own_python(tree: Tree, search: str, minor: str, name: str) -> OwnPython:
    """Return the Python of a minor version that is first on the PATH ``search``, or why there is none that fits.

    It must lie in a ``bin`` beside the ``lib`` that holds its standard library, as a virtual environment needs it.
    ``name`` is what the base is called.
    """
    for folder in search.split(":"):
        place = tree.real(f"{folder}/python{minor}")
        if place is None or place not in tree.found or not f"/{place}".endswith(f"/bin/python{minor}"):
            continue
        prefix = f"/{place}".removesuffix(f"/bin/python{minor}")
        if prefix and any(tree.read(f"{prefix}/{lib}/python{minor}/os.py") is not None for lib in ("lib", "lib64")):
            return OwnPython(prefix)
    others = sorted({m[1] for path in tree.found if (m := _PYTHON.fullmatch(path))}, key=numbers)
    has = f"it has {', '.join(others)}" if others else "it has none"
    return OwnPython(None, f"{name} has no whole Python {minor} on its PATH ({search}); {has}")


def check_base(base: PulledBase, glibc: str, places: Sequence[str]) -> None:
    """Make sure that wheels made for ``glibc`` run on the base, and that ``places`` (absolute paths) are free in it.

    Raises:
        BaseUnfitError: it does not fit; the message says why.

    """
    if base.glibc is None:
        if any(_MUSL.fullmatch(path) for path in base.tree.found):
            raise BaseUnfitError(
                f"{base.name} ({base.distribution}) has musl instead of glibc, and the lock's wheels are made for glibc",
                hint="use a base with glibc: Debian, Ubuntu, Fedora, or one made of these",
            )
        raise BaseUnfitError(
            f"{base.name} has no glibc for {base.architecture}, which the lock's wheels need",
            hint="use a base with glibc: Debian, Ubuntu, Fedora, or one made of these",
        )
    if not base.glibc:
        raise BaseUnfitError(f"{base.name}: which glibc it has cannot be told from its libc.so.6")
    if numbers(base.glibc) < numbers(glibc):
        raise BaseUnfitError(
            f"{base.name} ({base.distribution} {base.suite}) has glibc {base.glibc}, but the lock's wheels need {glibc}",
            hint="use a newer release of the base",
        )
    for place in places:
        if base.tree.has(place):
            raise BaseUnfitError(
                f"{base.name} has something at {place} already, where the environment is to lie",
                hint="set other `paths` in the recipe; to build on another environment, let its file say `extends`",
            )


def check_depth(base: PulledBase, own: int) -> None:
    """Raise BaseUnfitError when the base's layers and ``own`` more are too many for container engines."""
    below = len(base.layers)
    if below + own > MOST_LAYERS:
        raise BaseUnfitError(
            f"{base.name} has {below} layers, and with the environment's {own} they are more than {MOST_LAYERS}, "
            "which engines do not take",
            hint="lower `layering.budget` in the recipe, or take a base with fewer layers",
        )


def shortcomings(base: PulledBase, minor: str | None = None) -> tuple[str, ...]:
    """Return what users of an image on this base will miss or trip over, one sentence each.

    ``minor`` is the version of the base's own Python when that is to be the image's.
    """
    found = []
    if base.certificates is None:
        found.append("has no certificates of authorities (`ca-certificates`): Python's own TLS connections will fail")
    for library, package in _EXPECTED.items():
        if not any(base.tree.has(f"{folder.format(base.architecture)}/{library}") for folder in _LIBRARIES):
            found.append(f"has no {library} (Debian's `{package}`), which many wheels expect of the system")
    if not any(base.tree.has(f"{folder}/{name}") for folder in base.path.split(":") for name in ("cc", "gcc")):
        found.append("has no C compiler, which Triton and torch.compile need at run time")
    own = base.python(minor).prefix if minor else None
    if own is not None and not base.tree.has(f"{own}/include/python{minor}/Python.h"):
        found.append(f"has no headers of its Python {minor} (Python.h), which Triton and torch.compile need")
    if not base.tree.has("/bin/sh"):
        found.append("has no shell (/bin/sh): scripts do not run in it")
    if dropped := sorted(set(LEADING_ASTRAY) & base.image.config.env.keys()):
        found.append(f"sets {', '.join(dropped)}, which would lead to its own packages and is left out")
    searched = [path for path in base.env.get("LD_LIBRARY_PATH", "").split(":") if path]
    if foreign := [path for path in searched if not path.startswith("/usr/local/nvidia/")]:
        found.append(f"sets LD_LIBRARY_PATH to {':'.join(foreign)}: its libraries come before those of the packages")
    return tuple(found)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparison."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
