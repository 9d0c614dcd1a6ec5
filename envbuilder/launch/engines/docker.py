"""The engine of a host where Docker, or podman behind its Docker API, runs containers.

The command sees what it would see in the sandbox (see ``launch.job``). Two things differ: the user of the image is that
of the engine, so that root in the image is root on the host unless the engine is rootless; and a container outlives a
launcher that is killed with SIGKILL, because the engine is its parent.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
from docker.errors import APIError, DockerException
from docker.types import DeviceRequest, Mount
from docker.utils.socket import frames_iter

from envbuilder.errors import HostError
from envbuilder.launch.job import CommandNotFoundError, NotExecutableError, check_folder, command, temporary, variables
from envbuilder.launch.signals import forwarding

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

    from docker.models.containers import Container

    from envbuilder.launch.job import Job
    from envbuilder.oci.model import Config

_START = "start it (`systemctl start docker`), or name another with DOCKER_HOST; `--engine sandbox` needs none"
_NO_LIMIT: Any = None  # a job may be silent for days; the stubs know no such client
_STDOUT, _STDERR = 1, 2
_INIT = b"[FATAL tini"  # how the container's first process says that it cannot execute the command
_CHUNK = 1 << 16


@dataclass(frozen=True)
class DockerPlan:
    """A container to be created. ``temporary`` are folders in memory; ``gpus`` asks for all of the host's GPUs."""

    image: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    folder: str
    temporary: tuple[str, ...]
    gpus: bool


def run(job: Job, config: Config, ready: str) -> int:
    """Run the job in the image ``ready``, a reference the engine knows; see ``Engine``."""
    check_folder(job, config)
    return execute(plan(job, config, ready, os.environ, gpus=Path("/dev/nvidiactl").exists()), job.environment)


def plan(job: Job, config: Config, image: str, caller: Mapping[str, str], *, gpus: bool) -> DockerPlan:
    """Return how the job is run; raise InputError when there is no command. ``caller`` is the caller's environment."""
    return DockerPlan(
        image, command(job, config), variables(job, config, caller), str(job.folder), temporary(job, config), gpus
    )


def execute(plan: DockerPlan, environment: str) -> int:
    """Run the plan with our standard streams and return the exit code; see ``Engine``. The container is removed.

    Raises:
        CommandNotFoundError: the image, ``environment`` in the message, has no such command.
        HostError: the engine is not reachable, or refuses the container.

    """
    try:
        client = docker.from_env(timeout=_NO_LIMIT)
        container = _create(client, plan)
    except DockerException as error:
        raise HostError(f"the Docker engine cannot be used: {error}", hint=_START) from error
    try:
        return _attached(container, plan, environment)
    finally:
        with suppress(APIError):
            container.remove(force=True)
        client.close()


def _create(client: docker.DockerClient, plan: DockerPlan) -> Container:
    return client.containers.create(
        plan.image,
        entrypoint=[],
        command=list(plan.command),
        environment=dict(plan.env),
        working_dir=plan.folder,
        mounts=[Mount(plan.folder, plan.folder, type="bind")],
        tmpfs=dict.fromkeys(plan.temporary, "exec,mode=1777"),
        read_only=True,
        network_mode="host",
        ipc_mode="host",
        init=True,  # as the first process, a command would not be ended by signals it does not handle
        stdin_open=True,
        device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if plan.gpus else [],
    )


def _attached(container: Container, plan: DockerPlan, environment: str) -> int:
    wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
    stream: Any = container.attach_socket(params=wanted)
    raw: socket.socket = getattr(stream, "_sock", stream)

    def send(number: signal.Signals) -> None:
        with suppress(APIError):  # it has ended
            container.kill(number.name)

    refusal = b""
    try:
        with forwarding(send):
            container.start()
            threading.Thread(target=_feed, args=(raw,), daemon=True).start()
            for kind, data in frames_iter(stream, tty=False):  # type: ignore[no-untyped-call]
                if kind == _STDERR and data.startswith(_INIT):
                    refusal = data
                else:
                    _write(kind, data)
            code = int(container.wait()["StatusCode"])
    except APIError as error:
        raise HostError(f"the Docker engine could not start the container: {error.explanation or error}") from error
    finally:
        stream.close()
        raw.close()
    if refusal and code == CommandNotFoundError.exit_code:
        raise CommandNotFoundError(f"`{plan.command[0]}` is not in `{environment}`")
    if refusal and code == NotExecutableError.exit_code:
        raise NotExecutableError(f"`{plan.command[0]}` in `{environment}` is not executable")
    _write(_STDERR, refusal)
    return code


def _feed(raw: socket.socket) -> None:
    """Copy our standard input to the container until either ends."""
    with suppress(OSError):
        while data := os.read(0, _CHUNK):
            raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)


def _write(kind: int, data: bytes) -> None:
    while data:
        data = data[os.write(_STDERR if kind == _STDERR else _STDOUT, data) :]
