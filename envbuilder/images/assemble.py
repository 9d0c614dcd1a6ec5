"""Put an image together from its layers: a pure function of lock, recipe and what was used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.lock.files import format_lock
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Symlink
from envbuilder.oci.model import CONFIG, Config, Descriptor, History, Image, Manifest
from envbuilder.spec.accelerator import ACCELERATORS
from envbuilder.spec.drivers import driver_floor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.lock.model import Lock
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
class Origin:
    """What an image stands on: the system (``debian bookworm``) and the interpreter (``host 3.12.1``)."""

    system: str
    interpreter: str


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


def labels(environment: Environment, lock: Lock, origin: Origin) -> dict[str, str]:
    """Return the image's labels."""
    architectures = {ACCELERATORS[name].architecture for name in environment.accelerators}
    return {
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


def variables(lock: Lock, recipe: Recipe) -> dict[str, str]:
    """Return the image's environment variables; the recipe's own come last and win."""
    environment, python = recipe.paths.environment, recipe.paths.python
    major = lock.cuda.partition(".")[0]
    return {
        "PATH": f"{environment}/bin:{python}/bin:{_SYSTEM_PATH}",
        "VIRTUAL_ENV": environment,
        "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
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
    config = Config(
        architecture={"x86_64": "amd64", "aarch64": "arm64"}[lock.target.architecture],
        created=lock.input.exclude_newer,
        env=variables(lock, recipe),
        labels=labels(environment, lock, origin),
        diff_ids=tuple(made.layer.diff_id for made in layers),
        history=tuple(History(f"envbuilder: {made.title}") for made in layers),
        user=recipe.user,
        working_dir=recipe.working_dir,
        cmd=recipe.cmd,
    )
    data = config.to_bytes()
    manifest = Manifest(
        Descriptor(CONFIG, Digest.of(data), len(data)),
        tuple(made.layer.descriptor for made in layers),
        {
            "org.opencontainers.image.created": lock.input.exclude_newer,
            "org.opencontainers.image.title": environment.name,
        },
    )
    return Image(manifest, config)
