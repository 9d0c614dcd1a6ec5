"""The sandbox, for real: a small image, bubblewrap, and a launcher process of its own where signals are meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.errors import HostError
from envbuilder.launch.engines import sandbox
from envbuilder.launch.job import CommandNotFoundError, Job, NotExecutableError
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from tests.engines import need
from tests.smallimage import small_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAUNCHER = """
import sys
from pathlib import Path
from envbuilder.launch.engines import sandbox
from envbuilder.launch.job import Job
from envbuilder.oci.digest import Digest
from envbuilder.store.store import Store
store = Store(Path(sys.argv[1]))
image = store.image(store.find_image("small"))
root = store.root / "roots" / image.digest.hex
sys.exit(sandbox.run(Job("small", tuple(sys.argv[2:]), Path.cwd()), image.config, str(root)))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    need("bwrap")
    store = Store(tmp_path_factory.mktemp("sandbox") / "store")
    root_tree(store, small_image(store))
    return store


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def launch(store: Store, work: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    digest = store.find_image("small")
    assert digest is not None
    config = store.image(digest).config

    def launch(*argv: str, folder: Path = work, **env: str) -> tuple[int, str]:
        code = sandbox.run(Job("small", argv, folder, env), config, str(store.root / "roots" / digest.hex))
        return code, capfd.readouterr().out

    return launch


@contextmanager
def started(store: Store, work: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run a launcher as a process of its own, with pipes as its standard streams."""
    words = [sys.executable, "-c", LAUNCHER, str(store.root), *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=work, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


def processes(word: str) -> list[int]:
    """Return the processes with this word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("code", [0, 1, 3, 127])
def test_exit_code(launch: Callable[..., tuple[int, str]], code: int):
    assert launch("sh", "-c", f"exit {code}")[0] == code


def test_death_by_signal(launch: Callable[..., tuple[int, str]]):
    assert launch("sh", "-c", "kill -KILL $$")[0] == 128 + signal.SIGKILL


def test_without_a_command_the_images_own_runs(launch: Callable[..., tuple[int, str]]):
    assert launch()[0] == 7


def test_a_command_that_is_not_there(launch: Callable[..., tuple[int, str]]):
    with pytest.raises(CommandNotFoundError, match="`pyhton` is not in `small`: not on its PATH, /usr/bin") as caught:
        launch("pyhton")
    assert caught.value.exit_code == 127
    with pytest.raises(CommandNotFoundError, match="`/usr/bin/python3` is not in `small`: no such file"):
        launch("/usr/bin/python3")
    with pytest.raises(NotExecutableError) as not_executable:
        launch("/usr/bin/not-executable")
    assert not_executable.value.exit_code == 126


def test_a_program_of_the_work_folder(launch: Callable[..., tuple[int, str]], work: Path):
    (work / "own.sh").write_text("#!/bin/sh\necho from the work folder\n")
    (work / "own.sh").chmod(0o755)
    assert launch("./own.sh") == (0, "from the work folder\n")


def test_the_root_is_read_only(launch: Callable[..., tuple[int, str]], store: Store):
    script = "touch /usr/bin/sh || touch /new || echo x > /etc/passwd || : > /usr/bin/cat || rm /usr/bin/ls"
    assert launch("sh", "-c", script)[0] != 0
    for path in (store.root / "trees").glob("*/usr/bin/*"):
        assert path.stat().st_size > 0


def test_no_capability_can_mount_the_root_anew(launch: Callable[..., tuple[int, str]]):
    code, output = launch("cat", "/proc/self/status")
    fields = dict(line.split(":\t", 1) for line in output.splitlines())
    forbidden = 1 << 21 | 1 << 27 | 1 << 19 | 1 << 18  # SYS_ADMIN, MKNOD, SYS_PTRACE, SYS_CHROOT
    assert code == 0
    assert [int(fields[name], 16) & forbidden for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")] == [0] * 4
    assert fields["NoNewPrivs"] == "1"


def test_what_is_writable_is_gone_with_the_job(launch: Callable[..., tuple[int, str]]):
    script = "for d in /tmp /run $HOME /dev/shm; do mkdir -p $d/made-by-test && : > $d/made-by-test/x || exit 1; done"
    assert launch("sh", "-c", script + "; rm -r /dev/shm/made-by-test")[0] == 0
    assert launch("sh", "-c", "ls /tmp/made-by-test /run/made-by-test $HOME/made-by-test")[0] != 0
    assert not list(Path("/").glob("tmp/made-by-test"))


def test_the_work_folder_is_the_hosts(launch: Callable[..., tuple[int, str]], work: Path):
    (work / "in").write_text("given")
    code, output = launch("sh", "-c", "pwd; cat in; echo made > out")
    assert (code, output) == (0, f"{work}\ngiven")
    assert (work / "out").read_text() == "made\n"


def test_a_work_folder_where_the_image_has_none(launch: Callable[..., tuple[int, str]]):
    """Not below /tmp, which is mounted anyway: room must be made in a root that is read-only."""
    folder = Path("/srv" if os.access("/srv", os.W_OK) else Path.home(), f"envbuilder-test-{os.getpid()}", "deep")
    folder.mkdir(parents=True)
    try:
        code, output = launch("sh", "-c", "pwd; touch made; ls /bin/sh; touch /x /srv/x || echo closed", folder=folder)
        assert (code, output) == (0, f"{folder}\n/bin/sh\nclosed\n")
        assert (folder / "made").exists()
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.parent.rmdir()


def test_the_store_stays_read_only_inside_the_work_folder(launch: Callable[..., tuple[int, str]], store: Store):
    folder = store.root.parent
    code, output = launch("sh", "-c", f"touch fine; touch {store.root}/x || echo closed", folder=folder)
    assert (code, output) == (0, "closed\n")


def test_environment(launch: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, work: Path):
    for name in ("PYTHONPATH", "SECRET_TOKEN", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "https_proxy"):
        monkeypatch.setenv(name, "of the caller")
    code, output = launch("env", OWN="of the job")
    variables = dict(line.split("=", 1) for line in output.splitlines())
    assert code == 0
    assert variables["PATH"] == "/usr/bin"
    assert variables["HOME"] == "/root"
    assert variables["PWD"] == str(work)
    assert variables["GREETING"] == "hello from the image"
    assert variables["OWN"] == "of the job"
    assert variables["NCCL_DEBUG"] == variables["CUDA_VISIBLE_DEVICES"] == variables["https_proxy"] == "of the caller"
    assert not {"PYTHONPATH", "SECRET_TOKEN"} & set(variables)


def test_the_caller_is_the_images_user(launch: Callable[..., tuple[int, str]], work: Path):
    code, output = launch("sh", "-c", "id -u; id -un; touch made")
    assert (code, output) == (0, "0\nroot\n")
    assert (work / "made").stat().st_uid == os.getuid()


def test_standard_input_and_processes(store: Store, work: Path):
    with started(store, work, "sh", "-c", "cat; ls -d /proc/[0-9]*") as process:
        output, _ = process.communicate("typed\n", timeout=20)
    lines = output.splitlines()
    assert lines[0] == "typed"
    assert len(lines) <= 5  # init, sh, ls: nothing of the host's


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signals_reach_the_job(store: Store, work: Path, number: signal.Signals):
    script = f"trap 'echo caught; exit 5' {number.name.removeprefix('SIG')}; echo ready; sleep 30 & wait"
    with started(store, work, "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "caught\n"
        assert process.wait(10) == 5


def test_a_job_that_does_not_catch_the_signal(store: Store, work: Path):
    with started(store, work, "sh", "-c", "echo ready; exec sleep 3001.5") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM
    wait_for(lambda: not processes("3001.5"), "the job's end")


def test_no_orphan_when_the_launcher_is_killed(store: Store, work: Path):
    with started(store, work, "sh", "-c", "sleep 3002.5 & sleep 3002.5") as process:
        wait_for(lambda: len(processes("3002.5")) >= 2, "the job")
        process.kill()
        process.wait()
        wait_for(lambda: not processes("3002.5"), "the job's end")


def test_a_sandbox_that_cannot_be_made_is_explained(tmp_path: Path):
    """A program in bubblewrap's place that fails as it does without user namespaces."""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(HostError, match="No permissions to create new namespace") as caught:
        sandbox.execute(sandbox.SandboxPlan((str(broken), "--unshare-pid", "--ro-bind", "/", "/", "--", "true"), {}))
    assert "user namespaces" in (caught.value.hint or "")
