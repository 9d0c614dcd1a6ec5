"""The peers: a registry, a Docker engine, buildah and skopeo, each with all it keeps in one folder of the benchmark."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import CommandFailedError, Measured, Runner, started, tree
from benchmarks.ours import BASE, store_in
from benchmarks.wheelset import link
from envbuilder.run import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.ours import Input

#: What must be installed, and the package of Debian that has it.
PROGRAMS = {
    "dockerd": "docker.io", "docker": "docker.io", "docker-registry": "docker-registry",
    "buildah": "buildah", "skopeo": "skopeo", "bwrap": "bubblewrap",
}  # fmt: skip
BASE_TAG, TAG = "base", "bench"
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
# As uv's documentation advises for images: wheels by bind mount, bytecode compiled, no cache left in the layer. The
# cache lies on the layer's own file system, so that uv links files into place instead of copying them.
_DOCKERFILE = """\
ARG BASE
FROM ${BASE}
RUN --mount=type=bind,source=wheels,target=/wheels --mount=type=bind,source=tools,target=/tools \\
    /tools/uv pip install --python /opt/env/bin/python --offline --no-index --no-deps --no-cache --compile-bytecode \\
    /wheels/*.whl
"""


def missing() -> list[str]:
    """Return the Debian packages that must be installed first."""
    return sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})


def write_context(given: Input, folder: Path) -> None:
    """Make the folder that is built from: the Dockerfile, uv, and the wheels by hard link."""
    for part in ("wheels", "tools"):
        (folder / part).mkdir(parents=True)
    (folder / "Dockerfile").write_text(_DOCKERFILE)
    shutil.copy2(find("uv"), folder / "tools" / "uv")
    for wheel in given.wheels.iterdir():
        link(wheel, folder / "wheels" / wheel.name)


def change_context(given: Input, folder: Path) -> None:
    """Put the changed wheel in the place of the one it came from."""
    target = folder / "wheels" / given.changed_wheel.name
    target.unlink()
    link(given.changed_wheel, target)


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Run an empty registry that keeps its blobs in ``folder``; give its address; remove everything at the end."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\nhttp: {{addr: '{address}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{folder}/data'}}}}\n"
    )
    with _daemon([find("docker-registry"), "serve", config], folder / "log") as process:
        _wait_until(lambda: _listens(address), process, folder / "log")
        yield address
    shutil.rmtree(folder)


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the blobs that a registry keeps."""
    return sum(path.stat().st_size for path in (folder / "data").rglob("data") if path.is_file())


@dataclass(frozen=True)
class Docker:
    """A Docker engine of our own at the socket ``address``; ``runner`` counts the daemon's work."""

    client: Path
    address: str
    runner: Runner

    def take_base(self, given: Input) -> None:
        """Load the base image, which costs nothing in the comparison: our side knows its layers too."""
        base = f"oci:{store_in(given.seed)}:{BASE}"
        to = ["--dest-daemon-host", self.address, base, f"docker-daemon:{BASE_TAG}:latest"]
        self.runner.quietly(find("skopeo"), "--insecure-policy", "copy", *to)

    def build(self, context: Path) -> Measured:
        """Build with BuildKit; the size is what the one layer of packages holds, uncompressed."""
        words = ["build", "--network", "none", "--build-arg", f"BASE={BASE_TAG}:latest", "-t", TAG, str(context)]
        measured = self._measure(*words, env={"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"})
        sizes = [int(self._quietly("image", "inspect", "-f", "{{.Size}}", tag)) for tag in (TAG, BASE_TAG)]
        return replace(measured, size=sizes[0] - sizes[1])

    def push_base(self, address: str) -> None:
        """Let the registry have the base, as it does where images are made often."""
        self._quietly("tag", BASE_TAG, f"{address}/peer/docker:base")
        self._quietly("push", "-q", f"{address}/peer/docker:base")

    def push(self, address: str) -> Measured:
        """Push the image."""
        self._quietly("tag", TAG, f"{address}/peer/docker:{TAG}")
        return self._measure("push", "-q", f"{address}/peer/docker:{TAG}")

    def pull(self, address: str) -> Measured:
        """Pull the image; afterwards the layers are unpacked."""
        measured = self._measure("pull", "-q", f"{address}/peer/docker:{TAG}")
        self._quietly("tag", f"{address}/peer/docker:{TAG}", TAG)
        return measured

    def launch(self, *words: str) -> Measured:
        """Run a command in a new container."""
        return self._measure("run", "--rm", "--network", "none", TAG, *words)

    def forget(self) -> None:
        """Remove every image and everything cached."""
        if images := self._quietly("images", "-aq").split():
            self._quietly("rmi", "-f", *dict.fromkeys(images))
        self._quietly("builder", "prune", "-af")

    def _measure(self, *words: str, env: dict[str, str] | None = None) -> Measured:
        return self.runner.run([self.client, "--host", self.address, *words], env)

    def _quietly(self, *words: str) -> str:
        return self.runner.quietly(self.client, "--host", self.address, *words)


@contextmanager
def docker(folder: Path, runner: Runner) -> Iterator[Docker]:
    """Start dockerd with all it keeps in ``folder``; stop it and remove everything at the end.

    No network is set up (no bridge, no iptables): builds and containers need none.
    """
    folder.mkdir()
    address = f"unix://{folder}/sock"
    argv = [
        find("dockerd"), "--host", address, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec",
        "--pidfile", f"{folder}/pid", "--config-file", f"{folder}/none.json",
        "--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
    ]  # fmt: skip
    (folder / "none.json").write_text("{}")
    client = _fitting_client()
    try:
        with _daemon(argv, folder / "log") as process:
            _wait_until(lambda: _answers(client, address), process, folder / "log")
            yield Docker(client, address, replace(runner, daemons=(process.pid,)))
    finally:
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Buildah:
    """Buildah with storage of its own in ``folder``. It has no daemon."""

    folder: Path
    runner: Runner

    def take_base(self, given: Input) -> None:
        """Pull the base image from our layout into its storage."""
        image = self._quietly("pull", "-q", f"oci:{store_in(given.seed)}:{BASE}")
        self._quietly("tag", image, f"localhost/{BASE_TAG}:latest")

    def build(self, context: Path) -> Measured:
        """Build the same Dockerfile; the size is not asked for."""
        base = ["--pull-never", "--build-arg", f"BASE=localhost/{BASE_TAG}:latest"]
        isolation = ["--isolation", "chroot", "--network", "host", "--layers=false"]
        return self._measure("bud", *base, *isolation, "-t", f"localhost/{TAG}", str(context))

    def push_base(self, address: str) -> None:
        """Let the registry have the base."""
        self._quietly("push", "--tls-verify=false", f"localhost/{BASE_TAG}", f"docker://{address}/peer/buildah:base")

    def push(self, address: str) -> Measured:
        """Push the image."""
        return self._measure("push", "--tls-verify=false", f"localhost/{TAG}", f"docker://{address}/peer/buildah:{TAG}")

    def pull(self, address: str) -> Measured:
        """Pull the image; afterwards the layers are unpacked."""
        return self._measure("pull", "--tls-verify=false", f"docker://{address}/peer/buildah:{TAG}")

    def forget(self) -> None:
        """Remove every image."""
        self._quietly("rmi", "--all", "--force")

    def _measure(self, *words: str) -> Measured:
        return self.runner.run([*self._argv(), *words], self._env)

    def _quietly(self, *words: str) -> str:
        return self.runner.quietly(*self._argv(), *words, env=self._env)

    def _argv(self) -> list[str | Path]:
        where = ["--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run", "--storage-driver", "overlay"]
        return [find("buildah"), *where]

    @property
    def _env(self) -> dict[str, str]:
        return {"TMPDIR": str(self.folder)}


@contextmanager
def buildah(folder: Path, runner: Runner) -> Iterator[Buildah]:
    """Give buildah storage in ``folder``, and remove it at the end."""
    folder.mkdir()
    try:
        yield Buildah(folder, runner)
    finally:
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Skopeo:
    """Copies images between layouts and registries as they are; it builds nothing and unpacks nothing."""

    runner: Runner

    def push(self, layout: Path, name: str, address: str) -> Measured:
        """Copy an image of a layout, which our store is, to a registry."""
        where = f"docker://{address}/peer/skopeo:{name}"
        return self._copy("--dest-tls-verify=false", f"oci:{layout}:{name}", where)

    def pull(self, name: str, address: str, layout: Path) -> Measured:
        """Copy an image of a registry to a layout that does not exist yet."""
        return self._copy("--src-tls-verify=false", f"docker://{address}/peer/skopeo:{name}", f"oci:{layout}:{name}")

    def _copy(self, *words: str) -> Measured:
        return self.runner.run([find("skopeo"), "--insecure-policy", "copy", "-q", *words])


def versions(runner: Runner) -> Iterator[tuple[str, str]]:
    """Yield name and version of every program that is compared."""
    for name, words in (
        ("Docker", (find("dockerd"), "--version")), ("buildah", (find("buildah"), "--version")),
        ("skopeo", (find("skopeo"), "--version")), ("registry", (find("docker-registry"), "--version")),
        ("uv", (find("uv"), "--version")),
    ):  # fmt: skip
        yield name, runner.quietly(*words)


def _fitting_client() -> Path:
    """Return the ``docker`` of the daemon's own version, should PATH have several, or else the first."""
    folders = os.environ.get("PATH", "").split(":")
    found = [Path(folder) / "docker" for folder in folders if os.access(Path(folder) / "docker", os.X_OK)]
    version = _version(find("dockerd"))
    return next((client for client in found if _version(client) == version), found[0])


def _version(program: Path) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.partition(",")[0]


def _answers(client: Path, address: str) -> bool:
    done = subprocess.run([client, "--host", address, "version"], capture_output=True, check=False)
    return done.returncode == 0


def _listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
            raise CommandFailedError(f"{process.args!r} did not start:\n{tail}")
        time.sleep(0.1)


@contextmanager
def _daemon(argv: list[str | Path], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C must not stop it before what uses it has ended.
        process = subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        below = {pid: started(pid) for pid in tree(process.pid)}
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid, when in below.items():  # a build that was broken off may have left its container
            if when is not None and started(pid) == when:
                os.kill(pid, signal.SIGKILL)


def _unmount(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
