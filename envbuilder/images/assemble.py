"""Put an image together from its layers: a pure function of lock, recipe and what was used.

On a base that was an image itself, its layers and history come first, and of its configuration the variables, labels,
user and work folder are kept where ours say nothing. What belongs to the base's own service is left out: entry point,
ports, volumes, health check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.lock.files import format_lock
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Symlink, revision
from envbuilder.oci.model import CONFIG, Config, Descriptor, History, Image, Manifest
from envbuilder.spec.accelerator import ACCELERATORS
from envbuilder.spec.drivers import driver_floor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.images.base import PulledBase
    from envbuilder.lock.model import Lock
    from envbuilder.oci.blob import Compression
    from envbuilder.oci.model import Layer
    from envbuilder.spec.environment import Environment
    from envbuilder.spec.recipe import Recipe

_LABEL = "dev.envbuilder"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Where an image keeps what it was made from.
SHARE = "usr/share/envbuilder"


@dataclass(frozen=True)
class Made:
    """A layer and what it holds, in words, for the image's history."""

    layer: Layer
    title: str


@dataclass(frozen=True)
class ImagePython:
    """An image's interpreter: its kind and version, and its layer; None where the base brings it along."""

    kind: str
    version: str
    layer: Layer | None


@dataclass(frozen=True)
class Origin:
    """What an image stands on: the system (``debian bookworm``), the interpreter (``host 3.12.1``) and its prefix.

    ``base`` is the system when that was pulled as an image.
    """

    system: str
    interpreter: str
    python: str
    base: PulledBase | None = None


@dataclass(frozen=True)
class Frame:
    """A virtual environment's place in the image, and the prefix of the interpreter below it; absolute paths."""

    root: str
    python: str


def metadata_entries(lock: Lock, frame: Frame) -> list[Entry]:
    """Return the files of an environment's metadata layer: its lock, and the virtual environment's frame."""
    root, minor = frame.root.lstrip("/"), lock.target.python
    config = f"home = {frame.python}/bin\ninclude-system-site-packages = false\nversion = {minor}\n"
    links = {"python": f"{frame.python}/bin/python{minor}", "python3": "python", f"python{minor}": "python"}
    return [
        File(f"{root}/pyvenv.cfg", Bytes(config.encode())),
        *(Symlink(f"{root}/bin/{name}", target) for name, target in links.items()),
        Directory(SHARE),
        File(f"{SHARE}/{lock.environment}.lock.toml", Bytes(format_lock(lock).encode())),
    ]


def metadata_key(entries: Sequence[Entry], compression: Compression) -> str:
    """Return the key of the layer that these entries make: all that they hold, and how layers are written."""
    return f"metadata {Digest.of(repr(entries).encode())} {revision(compression)}"


def labels(environment: Environment, lock: Lock, origin: Origin) -> dict[str, str]:
    """Return the image's labels: the base's, and ours over them."""
    architectures = {ACCELERATORS[name].architecture for name in environment.accelerators}
    return {
        **(origin.base.image.config.labels if origin.base else {}),
        **_provenance(origin.base),
        "org.opencontainers.image.title": environment.name,
        "org.opencontainers.image.description": environment.title,
        "org.opencontainers.image.created": lock.input.exclude_newer,
        f"{_LABEL}.environment": environment.name,
        f"{_LABEL}.lock": str(Digest.of(format_lock(lock).encode())),
        f"{_LABEL}.python": lock.target.python,
        f"{_LABEL}.cuda": lock.cuda,
        f"{_LABEL}.driver-floor": driver_floor(lock.cuda) or "",
        f"{_LABEL}.gpu-architectures": ",".join(sorted(a for a in architectures if a)),
        f"{_LABEL}.accelerators": ",".join(environment.accelerators),
        f"{_LABEL}.end-of-support": environment.end_of_support.isoformat(),
        f"{_LABEL}.system": origin.system,
        f"{_LABEL}.interpreter": origin.interpreter,
    }


def _provenance(base: PulledBase | None) -> dict[str, str]:
    """Return what the image specification foresees to say which image this one is based on."""
    if base is None:
        return {}
    prefix = "org.opencontainers.image.base"
    return {f"{prefix}.name": base.name, f"{prefix}.digest": str(base.digest)}


def variables(lock: Lock, recipe: Recipe, origin: Origin) -> dict[str, str]:
    """Return the image's environment variables: the base's, over them ours; the recipe's own come last and win."""
    environment, base = recipe.paths.environment, origin.base
    major = lock.cuda.partition(".")[0]
    programs = [f"{environment}/bin", f"{origin.python}/bin"]
    searched = (base.path if base else _SYSTEM_PATH).split(":")
    certificates = base.certificates if base else "/etc/ssl/certs/ca-certificates.crt"
    return {
        # A base that names certificates of its own, a company's perhaps, is believed.
        **({"SSL_CERT_FILE": certificates} if certificates else {}),
        **(base.env if base else {}),
        "PATH": ":".join([*(folder for folder in programs if folder not in searched), *searched]),
        "VIRTUAL_ENV": environment,
        # Read by the NVIDIA container runtime. A driver that knows the first minor of our CUDA major is enough.
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "NVIDIA_REQUIRE_CUDA": f"cuda>={major}.0",
        **recipe.env,
    }


def assemble(
    environment: Environment, lock: Lock, recipe: Recipe, origin: Origin, layers: Sequence[Made]
) -> Image:  # fmt: skip
    """Return the image made of ``layers``, from the system up. No clock: it was created when its lock looked at the index."""
    base = origin.base
    below = base.image.config if base else None
    config = Config(
        architecture={"x86_64": "amd64", "aarch64": "arm64"}[lock.target.architecture],
        created=lock.input.exclude_newer,
        env=variables(lock, recipe, origin),
        labels=labels(environment, lock, origin),
        diff_ids=(*(below.diff_ids if below else ()), *(made.layer.diff_id for made in layers)),
        history=(*(base.history if base else ()), *(History(f"envbuilder: {made.title}") for made in layers)),
        user=recipe.user or (below.user if below else ""),
        working_dir=recipe.working_dir if recipe.working_dir != "/" or below is None else below.working_dir or "/",
        cmd=recipe.cmd,
    )
    data = config.to_bytes()
    manifest = Manifest(
        Descriptor(CONFIG, Digest.of(data), len(data)),
        (*(base.layers if base else ()), *(made.layer.descriptor for made in layers)),
        {
            "org.opencontainers.image.created": lock.input.exclude_newer,
            "org.opencontainers.image.title": environment.name,
            **_provenance(base),
        },
    )
    return Image(manifest, config)
