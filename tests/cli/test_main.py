"""The command line as a program: what goes where, exit codes, errors with hints, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envbuilder import __version__
from tests.indexes import serve
from tests.lock.test_resolve import SPEC
from tests.wheelmaker import make_wheel

ROOT = Path(__file__).parents[2]


class Shell:
    """Runs the program in a folder with a catalog and a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "UV_CACHE_DIR": str(folder / "uv"),
            "UV_HTTP_RETRIES": "0",
            "ENVBUILDER_PYTHON": os.path.realpath(sys.executable),
        }

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "envbuilder", *words], cwd=self.folder, env=self.env | variables,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **variables)
        out, error = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, out, error)

    def environment(self, name: str, *requires: str, **more: str) -> Path:
        text = {"head": "", "index": "", "cuda": "12.6", "constraints": "[]", "build": ""} | more
        spec = SPEC.format(requires=list(requires), **text)
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        file = self.folder / "environments" / f"{name}.toml"
        file.write_text(spec.replace('python = "3.12"', f'python = "{minor}"'))
        return file


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    for name in ("environments", "images", "lockfiles"):
        (tmp_path / name).mkdir()
    (tmp_path / "images" / "default.toml").write_text((ROOT / "images" / "default.toml").read_text())
    return Shell(tmp_path)


def test_version_and_help(shell: Shell):
    done = shell.run("--version")
    assert (done.returncode, done.stdout) == (0, f"envbuilder {__version__}\n")
    for command in ("list", "show", "lock", "build", "launch"):
        done = shell.run(command, "--help")
        assert done.returncode == 0
        assert "example" in done.stdout
    assert shell.run().returncode == 2


def test_data_on_stdout_everything_else_on_stderr(shell: Shell):
    shell.environment("one", "a")
    shell.environment("two", "a", head='extends = "one"')
    done = shell.run("list")
    assert done.stdout.splitlines()[0].split("\t")[0] == "one"
    assert done.stderr == ""
    document = json.loads(shell.run("list", "--json").stdout)
    assert document["schema"] == 1
    assert [entry["name"] for entry in document["environments"]] == ["one", "two"]


@pytest.mark.parametrize(
    ("words", "code", "error", "hint"),
    [
        (["biuld", "one"], 2, "invalid choice: 'biuld'", "did you mean `build`?"),
        (["build", "onee"], 2, "no environment is named `onee`", "did you mean `one`?"),
        (["build", "one"], 2, "one.lock.toml does not exist", "run `envbuilder lock one`"),
        (["show", "one"], 2, "one.lock.toml does not exist", "run `envbuilder lock one`"),
        (["build"], 2, "the following arguments are required: ENV", "--help"),
        (["launch", "onee", "--", "true"], 2, "no environment is named `onee`", "did you mean `one`?"),
        (["launch", "one", "--", "true"], 2, "there is no image of `one`", "`envbuilder build one`"),
    ],
)
def test_wrong_input_is_exit_2_with_a_hint(shell: Shell, words: list[str], code: int, error: str, hint: str):
    shell.environment("one", "a")
    done = shell.run(*words)
    assert done.returncode == code
    assert done.stdout == ""
    assert error in done.stderr
    assert "hint: " in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_spec_with_a_typo_names_file_and_place(shell: Shell):
    file = shell.environment("one", "a", build='[smokes]\nimports = ["a"]')
    done = shell.run("lock", "one")
    assert done.returncode == 2
    assert f"error: {file}: smokes: unknown key\nhint: did you mean `smoke`?\n" == done.stderr


def test_lock_check_and_drift(shell: Shell):
    with serve(shell.folder / "index") as index:
        index.add(make_wheel("a", "1.0"), make_wheel("a", "2.0"))
        shell.environment("one", "a")
        done = shell.run("lock", "one", "--index-url", index.url)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
    assert shell.run("lock", "one", "--check").returncode == 0
    shown = shell.run("show", "one")
    assert shown.stdout.split("\t")[:2] == ["a", "2.0"]
    shell.environment("one", "a<2")
    done = shell.run("lock", "one", "--check")
    assert (done.returncode, done.stdout) == (1, "one: packages.requires: - a\none: packages.requires: + a<2\n")
    done = shell.run("build", "one")
    assert done.returncode == 1
    assert "the lock of one is stale:\n  packages.requires: - a" in done.stderr
    assert "hint: run `envbuilder lock one`" in done.stderr


def test_an_index_out_of_reach_is_exit_3(shell: Shell):
    shell.environment("one", "a")
    done = shell.run("lock", "one", ENVBUILDER_INDEX_URL="http://127.0.0.1:9/simple/")
    assert done.returncode == 3
    assert "could not be asked" in done.stderr
    assert not list((shell.folder / "lockfiles").iterdir())


def test_ctrl_c_ends_at_once_and_leaves_nothing_half_written(shell: Shell):
    with serve(shell.folder / "index", metadata=False, ranges=False) as index:
        index.add(make_wheel("a", files={"a.bin": os.urandom(3_000_000)}))
        shell.environment("one", "a")
        fault = index.fail("*/a-1.0-*.whl", slow=0.5)
        process = shell.start("lock", "one", "--index-url", index.url)
        while not index.paths("*/a-1.0-*.whl"):
            time.sleep(0.02)
            assert process.poll() is None
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=10)
        assert time.monotonic() - begun < 3
        assert process.returncode == 130
        assert "Traceback" not in error
        assert not list((shell.folder / "lockfiles").iterdir())
        index.faults.remove(fault)
        assert shell.run("lock", "one", "--index-url", index.url).returncode == 0


def test_a_closed_pipe_is_no_error(shell: Shell):
    shell.environment("one", "a")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "envbuilder", "list"], cwd=shell.folder, env=shell.env, stdout=write,
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    assert "Traceback" not in done.stderr
