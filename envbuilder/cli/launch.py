"""``envbuilder launch``: run a command in an environment's image on this host, attached."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envbuilder.oci.model import Image
    from envbuilder.store.store import Store

EPILOG = """\
examples:
  envbuilder launch ai-v4 -- python train.py --epochs 3
  envbuilder launch ai-v4 --env WANDB_MODE=offline -- torchrun --nproc-per-node 8 train.py
  envbuilder launch base-v4 --engine docker -- python -c 'import torch; print(torch.__version__)'

The work folder is the current one, at its own path. /tmp, /run and HOME are writable and gone with the job; everything
else is read-only. The exit code is the command's own.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("environment", metavar="ENV", help="the environment, built before")
    parser.add_argument("--engine", default="sandbox", help="what starts the image: sandbox (default) or docker")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable; NAME alone passes yours on"
    )
    # Not "*", which argparse matches with nothing when an option stands before the command; and not "+", of which it
    # takes away every `--`, also the command's own.
    words = parser.add_argument("words", nargs=argparse.PARSER, metavar="CMD", help="the command, after `--`")
    words.required = False


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: no such environment in the store, no such engine, a bad option.
        CommandNotFoundError, HostError: see ``Engine``.

    """
    from envbuilder.cli.stored import stored_image
    from envbuilder.launch.engines import engine
    from envbuilder.launch.job import Job
    from envbuilder.store.store import Store, default_root

    chosen = engine(args.engine)
    job = Job(args.environment, command(args.words), Path.cwd(), variables(args.env))
    store = Store(default_root())
    image = stored_image(store, args.environment)
    return chosen.run(job, image.config, make_ready(args.engine, store, image, args.environment))


def command(words: list[str] | None) -> tuple[str, ...]:
    """Return the command's words without the ``--`` that stands before them; none when there is no command."""
    words = words or []
    return tuple(words[1:] if words[:1] == ["--"] else words)


def variables(options: list[str]) -> dict[str, str]:
    """Read ``--env`` options: NAME=VALUE, or NAME for the caller's own value, left out when there is none.

    Raises:
        InputError: an option has no name.

    """
    import os

    from envbuilder.errors import InputError

    result = {}
    for option in options:
        name, given, value = option.partition("=")
        if not name:
            raise InputError(f"`--env {option}` names no variable", hint="write `--env NAME=VALUE`")
        if given or name in os.environ:
            result[name] = value if given else os.environ[name]
    return result


def make_ready(engine: str, store: Store, image: Image, name: str) -> str:
    """Bring the image to where the engine takes it from, and return that place."""
    if engine == "sandbox":
        from envbuilder.store.roots import root_tree

        return str(root_tree(store, image))
    from envbuilder.images.load import load

    return load(image, store, engine, name)
