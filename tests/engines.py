"""What tests need of the machine. A Docker engine is the one that answers, or Debian's dockerd, started for the run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import pytest
from docker.errors import DockerException

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "docker.io"
USUAL = "unix:///var/run/docker.sock"
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0


def reachable() -> str | None:
    """Return the address of the engine that DOCKER_HOST, or else the usual socket, leads to when it answers."""
    address = os.environ.get("DOCKER_HOST", USUAL)
    return address if answers(address) else None


def answers(address: str) -> bool:
    """Return whether an engine answers there."""
    path = address.removeprefix("unix://")
    if (
        path != address and not Path(path).is_socket()
    ):  # asked first: the SDK leaves a socket open when it cannot connect
        return False
    try:
        client = docker.DockerClient(address, timeout=5)
        try:
            return client.ping()
        finally:
            client.close()
    except DockerException:
        return False


def unavailable(reason: str) -> None:
    """Fail in CI, where everything is installed; skip elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"this test cannot run: {reason}")
    pytest.skip(reason)


def need(program: str) -> None:
    """Skip the test, or fail in CI, when a program is not installed."""
    if shutil.which(program) is None:
        unavailable(f"`{program}` is not installed")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Make ``folder`` a file system in memory with room for ``size`` (``1m``) inside the block."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(words, check=False, capture_output=True).returncode != 0:
        unavailable("a small file system can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # a failure holds files of it


@contextmanager
def started() -> Iterator[str]:
    """Start dockerd on a private socket with a private store; stop it and remove everything at the end.

    No network is set up (no bridge, no iptables): images come from our own archives and containers share the host's.
    dockerd picks the storage driver: overlay where that works, else vfs, which copies each layer.
    """
    # The path of a socket may have 107 bytes: not below pytest's long folder names.
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    log = folder / "log"
    address = f"unix://{folder}/docker.sock"
    argv = [
        "dockerd", "--host", address, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec",
        "--pidfile", f"{folder}/pid", "--config-file", f"{folder}/none.json",
        "--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
    ]  # fmt: skip
    (folder / "none.json").write_text("{}")
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C in the test run must not stop it before the tests have ended.
        daemon = subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_until_it_answers(daemon, address, log)
        yield address
    finally:
        _stop(daemon)
        _remove(folder)


def _wait_until_it_answers(daemon: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and daemon.poll() is None:
        if answers(address):
            return
        time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    unavailable(f"dockerd did not start:\n{tail}")


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    """Stop dockerd, which stops its containerd; whatever is left of the session after a while is killed."""
    daemon.terminate()
    try:
        daemon.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()


def _remove(folder: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    for mount in sorted((line.split()[1] for line in mounts if line.split()[1].startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def engine() -> Iterator[str]:
    """Give the address of an engine, and let DOCKER_HOST lead to it inside the block."""
    address = reachable()
    if address is not None:
        yield address
        return
    if shutil.which("dockerd") is None:
        unavailable(f"no Docker engine answers, and dockerd (Debian's package {PACKAGE}) is not installed")
    if os.geteuid() != 0:
        unavailable("no Docker engine answers, and starting one takes root")
    with started() as address:
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = address
        try:
            yield address
        finally:
            del os.environ["DOCKER_HOST"]
            if before is not None:
                os.environ["DOCKER_HOST"] = before
