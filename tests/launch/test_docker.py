"""The docker engine, for real."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import docker
import pytest

from envbuilder.images.load import load
from envbuilder.launch.engines import docker as engine
from envbuilder.launch.job import CommandNotFoundError, Job, NotExecutableError
from envbuilder.store.store import Store
from tests.smallimage import small_image

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.docker

LAUNCHER = """
import sys
from pathlib import Path
from envbuilder.launch.engines import docker
from envbuilder.launch.job import Job
from envbuilder.store.store import Store
store = Store(Path(sys.argv[1]))
config = store.image(store.find_image("small")).config
sys.exit(docker.run(Job("small", tuple(sys.argv[3:]), Path.cwd()), config, sys.argv[2]))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("docker") / "store")


@pytest.fixture(scope="module")
def reference(store: Store, docker_engine: str) -> str:  # noqa: ARG001  (DOCKER_HOST leads to it)
    return load(small_image(store), store, "docker", "small")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def launch(
    store: Store, reference: str, work: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    digest = store.find_image("small")
    assert digest is not None
    config = store.image(digest).config

    def launch(*argv: str) -> tuple[int, str, str]:
        code = engine.run(Job("small", argv, work, {"OWN": "of the job"}), config, reference)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return launch


def containers() -> int:
    client = docker.from_env()
    try:
        return len(client.containers.list(all=True))
    finally:
        client.close()


def test_output_and_exit_code(launch: Callable[..., tuple[int, str, str]]):
    assert launch("sh", "-c", "echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
    assert launch("true") == (0, "", "")
    assert launch()[0] == 7
    assert containers() == 0


def test_commands_that_cannot_run(launch: Callable[..., tuple[int, str, str]]):
    with pytest.raises(CommandNotFoundError, match="`pyhton` is not in `small`"):
        launch("pyhton")
    with pytest.raises(NotExecutableError):
        launch("/usr/bin/not-executable")
    assert containers() == 0


def test_the_command_sees_what_it_sees_in_the_sandbox(launch: Callable[..., tuple[int, str, str]], work: Path):
    (work / "in").write_text("given\n")
    script = """
        pwd; cat in; echo made > out; echo $OWN; echo $GREETING; echo $HOME
        for d in /tmp /run $HOME /dev/shm; do : > $d/made-by-test || exit 1; done
        rm /dev/shm/made-by-test
        touch /usr/bin/sh /new || echo closed
    """
    code, output, _ = launch("sh", "-c", script)
    assert output == f"{work}\ngiven\nof the job\nhello from the image\n/root\nclosed\n"
    assert code == 0
    assert (work / "out").read_text() == "made\n"


@pytest.mark.parametrize(("trap", "expected"), [("trap 'echo caught; exit 5' TERM;", ("caught\n", 5)), ("", ("", 143))])
def test_standard_input_and_signals(store: Store, reference: str, work: Path, trap: str, expected: tuple[str, int]):
    script = f"{trap} read line; echo $line; sleep 30 & wait"
    words = [sys.executable, "-c", LAUNCHER, str(store.root), reference, "sh", "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=work, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("typed\n")
        process.stdin.flush()
        assert process.stdout.readline() == "typed\n"
        process.send_signal(signal.SIGTERM)
        assert (process.stdout.read(), process.wait(20)) == expected
    assert containers() == 0
