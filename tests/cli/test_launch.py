from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest

from envbuilder.cli import launch
from envbuilder.errors import InputError
from envbuilder.store.store import Store, default_root
from tests.engines import need
from tests.smallimage import small_image

if TYPE_CHECKING:
    from pathlib import Path


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    launch.configure(parser)
    return parser.parse_args(argv)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ai-v4"], ()),
        (["ai-v4", "--engine", "sandbox"], ()),
        (["ai-v4", "--", "python", "-c", "1"], ("python", "-c", "1")),
        (["ai-v4", "--engine", "sandbox", "--", "git", "checkout", "--", "file"], ("git", "checkout", "--", "file")),
        (["--env", "A=1", "ai-v4", "python", "--env", "x"], ("python", "--env", "x")),
    ],
)
def test_what_belongs_to_the_command(argv: list[str], words: tuple[str, ...]):
    args = parse(*argv)
    assert args.environment == "ai-v4"
    assert launch.command(args.words) == words


def test_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINE", "value")
    monkeypatch.delenv("NOT_SET", raising=False)
    assert launch.variables(["A=1", "B=x=y", "C=", "MINE", "NOT_SET"]) == {
        "A": "1", "B": "x=y", "C": "", "MINE": "value",
    }  # fmt: skip
    with pytest.raises(InputError, match="`--env =1` names no variable"):
        launch.variables(["=1"])


def test_an_environment_that_was_not_built():
    with pytest.raises(InputError, match="no image of `ai-v4`") as caught:
        launch.run(parse("ai-v4", "--", "true"))
    assert caught.value.hint == "build it: `envbuilder build ai-v4`"


def test_an_unknown_engine_is_named_before_anything_else():
    with pytest.raises(InputError, match="no engine `sandbag`"):
        launch.run(parse("ai-v4", "--engine", "sandbag"))


def test_launch(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    need("bwrap")
    small_image(Store(default_root()), "ai-v4")
    script = 'echo "$A $1"; cat file; exit 3'
    (tmp_path / "file").write_text("of the work folder\n")
    assert launch.run(parse("ai-v4", "--env", "A=1", "--", "sh", "-c", script, "sh", "--")) == 3
    assert capfd.readouterr().out == "1 --\nof the work folder\n"
    assert launch.run(parse("ai-v4")) == 7
