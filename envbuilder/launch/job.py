"""What to run: a value that every engine plans from, and what all engines agree on.

An image looks the same to a command whichever engine starts it: its root is read-only; ``/tmp``, ``/run`` and HOME are
writable, lie in memory and are gone with the job; the work folder is the host's, at its own path; network and
``/dev/shm`` are the host's. What is to outlive the job, and caches of many gigabytes (``HF_HOME``), belong below the
work folder.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envbuilder.errors import EnvbuilderError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from envbuilder.oci.model import Config

#: Variables of the caller that a job inherits; a name that ends in "*" stands for all that begin so. Anything else of
#: the caller's environment (PATH, PYTHONPATH, VIRTUAL_ENV, ...) would make the image behave differently here.
INHERITED = (
    "CUDA_VISIBLE_DEVICES", "NCCL_*", "NO_COLOR", "TERM",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
#: Folders that hold what makes an image run.
_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")
#: PATH for an image that sets none, as container engines have it.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CommandNotFoundError(EnvbuilderError):
    """The command does not exist in the image. Exit code 127, as a shell's."""

    exit_code = 127


class NotExecutableError(EnvbuilderError):
    """The command exists but cannot be executed. Exit code 126, as a shell's."""

    exit_code = 126


@dataclass(frozen=True)
class Job:
    """A command to run in an image: ``environment`` names the image in messages, ``folder`` is the work folder.

    An empty ``argv`` stands for the image's own command. ``env`` is set on top of the image's and the inherited
    variables.
    """

    environment: str
    argv: tuple[str, ...]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)


def command(job: Job, config: Config) -> tuple[str, ...]:
    """Return the words to run: the job's, or the image's own when it has none, after the image's entrypoint.

    Raises:
        InputError: neither names a command.

    """
    words = (*config.entrypoint, *(job.argv or config.cmd))
    if not words:
        raise InputError(
            f"`{job.environment}` has no command of its own", hint="give one: `envbuilder launch ENV -- CMD`"
        )
    return words


def home(config: Config) -> str:
    """Return HOME in the image."""
    is_root = config.user.partition(":")[0] in {"", "0", "root"}
    return config.env.get("HOME") or ("/root" if is_root else "/tmp")  # noqa: S108  (a folder of the image)


def temporary(job: Job, config: Config) -> tuple[str, ...]:
    """Return the folders that are writable and gone with the job; one that the work folder covers is not among them."""
    folders = dict.fromkeys(("/run", "/tmp", home(config)))  # noqa: S108  (folders of the image)
    return tuple(folder for folder in folders if not below(folder, str(job.folder)))


def variables(job: Job, config: Config, caller: Mapping[str, str]) -> dict[str, str]:
    """Return the job's environment; ``caller`` is the caller's, of which little is inherited."""
    prefixes = tuple(name.removesuffix("*") for name in INHERITED if name.endswith("*"))
    inherited = {name: value for name, value in caller.items() if name in INHERITED or name.startswith(prefixes)}
    own = {"PATH": DEFAULT_PATH, "HOME": home(config)} | dict(config.env)
    return own | inherited | {"PWD": str(job.folder)} | dict(job.env)


def check_folder(job: Job, config: Config) -> None:
    """Raise InputError when mounting the work folder at its own path would hide the image's programs."""
    path = posixpath.normpath(str(job.folder))
    programs = (config.env.get("PATH") or DEFAULT_PATH).split(":")
    hides = path == "/" or any(below(program, path) for program in programs if program.startswith("/"))
    if hides or any(below(path, system) for system in _SYSTEM):
        raise InputError(
            f"the work folder `{path}` would hide the image's own files",
            hint="start from another folder, such as one in your home",
        )


def below(path: str, folder: str) -> bool:
    """Return whether ``path`` is ``folder`` or lies in it; both absolute and in plain form."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")
