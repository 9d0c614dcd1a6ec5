"""The engines that start an image on this host: modules that satisfy ``Engine``, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from envbuilder.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from envbuilder.launch.job import Job
    from envbuilder.oci.model import Config

ENGINES = {
    "docker": "envbuilder.launch.engines.docker",
    "sandbox": "envbuilder.launch.engines.sandbox",
}


class Engine(Protocol):
    """Starts a job in an image that has been made ready for it."""

    def run(self, job: Job, config: Config, ready: str) -> int:
        """Run the job to its end, attached, and return its exit code (128 + n when signal n ended it).

        ``ready`` is where the image lies for this engine: its root folder for the sandbox, its reference in the
        engine's own store for docker. Called from the main thread: signals are forwarded while the job runs.

        Raises:
            CommandNotFoundError: the image has no such command.
            HostError: the engine cannot work on this host.

        """


def engine(name: str) -> Engine:
    """Return an engine by name; raise InputError when there is none of that name."""
    if name not in ENGINES:
        raise InputError(f"there is no engine `{name}`", hint=did_you_mean(name, ENGINES))
    return cast("Engine", import_module(ENGINES[name]))
