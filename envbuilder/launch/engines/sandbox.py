"""The engine that needs no daemon and no root: bubblewrap around the image's root folder.

The files of a root are shared with other images by hard link, so nothing in the sandbox may be able to write to them:
the root is mounted read-only, and a job that root starts loses the capabilities that could mount it anew.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder.errors import HostError, InputError
from envbuilder.launch import driver as nvidia
from envbuilder.launch.job import DEFAULT_PATH, below, check_folder, command, temporary, variables
from envbuilder.launch.root import Root, ancestors, check_program, look, user_ids
from envbuilder.launch.signals import forwarding
from envbuilder.run import ProgramFailedError, ProgramMissingError, find
from envbuilder.run import run as run_program

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator, Mapping

    from envbuilder.launch.job import Job
    from envbuilder.oci.model import Config

_INSTALL = "install bubblewrap 0.5 or newer (package `bubblewrap`), or use another engine: `--engine docker`"
_ALLOW = (
    "allow user namespaces (sysctl `user.max_user_namespaces`, `kernel.unprivileged_userns_clone=1`, "
    "`kernel.apparmor_restrict_unprivileged_userns=0`), or use another engine: `--engine docker`"
)
#: What root keeps in the sandbox, by the kernel's numbers: less than a container engine leaves it. Above all not
#: CAP_SYS_ADMIN, which could mount the root anew, nor CAP_MKNOD, which could reach the disk below it.
_CAPABILITIES = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4, "CAP_KILL": 5, "CAP_SETGID": 6,
    "CAP_SETUID": 7, "CAP_NET_BIND_SERVICE": 10, "CAP_IPC_LOCK": 14,
}  # fmt: skip
_NETWORK = ("/etc/hosts", "/etc/resolv.conf")


@dataclass(frozen=True)
class Host:
    """What is planned from: the program, the caller, and what of this host is shared with the job.

    ``capabilities`` are those that the caller holds, as a bit mask.
    """

    bwrap: Path
    uid: int
    gid: int
    capabilities: int
    environment: Mapping[str, str]
    network: tuple[str, ...]
    driver: nvidia.Driver


@dataclass(frozen=True)
class SandboxPlan:
    """The whole command line, and the whole environment that it is run with."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def run(job: Job, config: Config, ready: str) -> int:
    """Run the job in the root folder ``ready``; see ``Engine``."""
    check_folder(job, config)
    host = this_host()
    root = look(Path(ready), (str(job.folder), *temporary(job, config)))
    planned = plan(job, config, root, user_ids(root.path, config.user), host)
    check_program(root.path, command(job, config)[0], planned.env.get("PATH", DEFAULT_PATH), job)
    return execute(planned)


def this_host() -> Host:
    """Return the facts of this host; raise ProgramMissingError without bubblewrap."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    permitted = next(line.split()[1] for line in status.splitlines() if line.startswith("CapPrm:"))
    return Host(
        bwrap=find("bwrap", hint=_INSTALL),
        uid=os.getuid(),
        gid=os.getgid(),
        capabilities=int(permitted, 16),
        environment=dict(os.environ),
        network=tuple(path for path in _NETWORK if Path(path).exists()),
        driver=nvidia.find_driver(),
    )


def plan(job: Job, config: Config, root: Root, user: tuple[int, int], host: Host) -> SandboxPlan:
    """Return how the job is run; ``user`` is whom the image says to run as: the caller, seen from inside.

    Raises:
        InputError: the work folder cannot be mounted, or there is no command.

    """
    env = variables(job, config, host.environment)
    if host.driver.files:
        # Last: a CUDA compatibility library of the image is meant to win over the host's driver.
        env["PATH"] = f"{env['PATH']}:{nvidia.FOLDER}/bin"
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (env.get("LD_LIBRARY_PATH"), f"{nvidia.FOLDER}/lib64")))
    # The dynamic linker's variables are for the job, not for bubblewrap itself.
    linker = {name: value for name, value in sorted(env.items()) if name.startswith("LD_")}
    words = [
        str(host.bwrap), "--die-with-parent", "--new-session", "--unshare-pid", *_user(user, host),
        *_root(root, str(job.folder), temporary(job, config)),
        *_system(host),
        *_writable(job, config, root),
        *(word for name, value in linker.items() for word in ("--setenv", name, value)),
        "--chdir", str(job.folder), "--", *command(job, config),
    ]  # fmt: skip
    return SandboxPlan(tuple(words), {name: value for name, value in env.items() if name not in linker})


def _user(user: tuple[int, int], host: Host) -> Iterator[str]:
    if host.uid == 0:  # of whom bubblewrap takes nothing by itself, not even in a user namespace
        yield from ("--cap-drop", "ALL")
    if (host.uid, host.gid) != user or host.uid != 0:
        yield from ("--unshare-user", "--uid", str(user[0]), "--gid", str(user[1]))
        return
    # Never one that the caller lacks: bubblewrap would then drop none, without a word.
    for name, number in _CAPABILITIES.items():
        if host.capabilities >> number & 1:
            yield from ("--cap-add", name)


def _root(root: Root, work: str, covered: tuple[str, ...]) -> Iterator[str]:
    """Mount the image, with room for what is mounted where it has no folder.

    Nothing can be made in a read-only root. So the folders that lack something are made anew in memory, and what the
    image has in them is mounted one by one.
    """
    lacking = {target: _to_open(root, target, covered) for target in (work, *covered)}
    opened = {folder for folders in lacking.values() for folder in folders}
    if not opened:
        yield from ("--ro-bind", str(root.path), "/")
        return
    yield from ("--tmpfs", "/")
    for folder in sorted(opened):
        for name, link in sorted(root.folders[folder].items()):
            path = f"{folder.rstrip('/')}/{name}"
            if link is not None:
                yield from ("--symlink", link, path)
            elif path not in opened:
                yield from ("--ro-bind", f"{root.path}{path}", path)
    # Made before the root is closed: what comes after is mounted on folders that are there.
    for target, folders in lacking.items():
        if folders:
            yield from ("--dir", target)
    yield from ("--remount-ro", "/")


def _to_open(root: Root, target: str, covered: tuple[str, ...]) -> tuple[str, ...]:
    if any(target != folder and below(target, folder) for folder in covered):
        return ()
    steps = ancestors(target)
    for number, step in enumerate(steps):
        if step in root.folders:
            continue
        parent, _, name = step.rpartition("/")
        if name in root.folders[parent or "/"]:
            raise InputError(
                f"`{target}` cannot be mounted: `{step}` is a link or a file in the image",
                hint="start from a folder that does not lie below it",
            )
        return steps[:number]
    return ()


def _system(host: Host) -> Iterator[str]:
    yield from ("--proc", "/proc", "--ro-bind", "/sys", "/sys", "--dev", "/dev", "--bind", "/dev/shm", "/dev/shm")  # noqa: S108  (the host's, shared on purpose)
    for device in host.driver.devices:
        yield from ("--dev-bind", device, device)
    for path in host.network:
        yield from ("--ro-bind", path, path)
    if host.driver.files:
        folders = sorted({target.rpartition("/")[0] for _, target in host.driver.files})
        for folder in folders:
            yield from ("--tmpfs", folder)
        for source, target in host.driver.files:
            yield from ("--ro-bind", source, target)
        for folder in folders:
            yield from ("--remount-ro", folder)


def _writable(job: Job, config: Config, root: Root) -> Iterator[str]:
    for folder in temporary(job, config):
        yield from ("--perms", "1777", "--tmpfs", folder)
    yield from ("--bind", str(job.folder), str(job.folder))
    store = str(root.path.parent.parent)
    if below(store, str(job.folder)):  # as when the work folder is the home folder
        yield from ("--ro-bind", store, store)


def execute(plan: SandboxPlan) -> int:
    """Run the plan with our standard streams and return the exit code; see ``Engine``.

    Raises:
        HostError: bubblewrap could not set up the sandbox.

    """
    reading, writing = os.pipe()
    argv = (plan.argv[0], "--json-status-fd", str(writing), *plan.argv[1:])
    process: subprocess.Popen[bytes] | None = None
    group: int | None = None
    early: list[signal.Signals] = []  # what came before there was anyone to pass it on to

    def send(number: signal.Signals) -> None:
        # The job leads a session of its own, whose other members get the signal as from a terminal. Before it has
        # one, bubblewrap is what must end.
        with suppress(ProcessLookupError):
            if group is not None:
                os.killpg(group, number)
                return
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    # Forwarded from before the start: a job may be running before we hear of it.
    with open(reading, encoding="utf-8") as status, forwarding(send):  # noqa: PTH123  (a descriptor)
        try:
            # In another session than ours: Ctrl-C must reach the job through us, and not kill bubblewrap under it.
            process = subprocess.Popen(argv, env=dict(plan.env), pass_fds=(writing,), start_new_session=True)
        except FileNotFoundError as error:
            raise ProgramMissingError("bwrap", hint=_INSTALL) from error
        finally:
            os.close(writing)
        for number in early:
            process.send_signal(number)
        group = _field(status.readline(), "child-pid")
        code = process.wait()
        exited = next((e for line in status if (e := _field(line, "exit-code")) is not None), None)
    if exited is not None:
        return exited
    if code < 0:
        return 128 - code
    raise _explain(plan)


def _field(line: str, name: str) -> int | None:
    document = json.loads(line) if line.strip() else {}
    value = document.get(name)
    return value if isinstance(value, int) else None


def _explain(plan: SandboxPlan) -> HostError:
    """Find out whether bubblewrap works here at all, so that the error can name the cause."""
    isolation = plan.argv[1 : next(i for i, word in enumerate(plan.argv) if word in {"--tmpfs", "--ro-bind"})]
    try:
        run_program([plan.argv[0], *isolation, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"])
    except ProgramFailedError as error:
        return HostError(f"bubblewrap cannot make a sandbox on this host: {error.stderr.strip()}", hint=_ALLOW)
    return HostError(
        "bubblewrap could not start the job; its own message stands above",
        hint="when a program is not found that is there, the loader or interpreter it names is not in the image",
    )
