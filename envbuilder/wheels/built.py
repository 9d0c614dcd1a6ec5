"""What is known of wheels that were built from source archives: asked by every build, so it imports little."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder import parallel
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import canonical_json
from envbuilder.run import run
from envbuilder.wheels.repack import REVISION as REPACK_REVISION

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.lock.model import Package
    from envbuilder.store.store import Store

_KIND = "wheel"
#: Enters the key of a built wheel: whatever changes the bytes must change this.
REVISION = f"source 1, {REPACK_REVISION}"


@dataclass(frozen=True)
class BuiltWheel:
    """A wheel that was built: its file name, and its blob in the store."""

    file: str
    digest: Digest
    size: int


@dataclass(frozen=True)
class Tools:
    """What builds on this machine, in full versions: they enter the key of what is built."""

    python: str
    compiler: str


def find_tools(python: Path) -> Tools:
    """Return what builds here: ``python``, to the patch level and how it was built, and the C compiler, if any."""
    code = "import sys, sysconfig; print(sys.version, sysconfig.get_platform())"
    compiler = shutil.which((os.environ.get("CC", "").split() or ["cc"])[0])
    questions: list[list[str | Path]] = [[python, "-I", "-c", code]]
    if compiler is not None:
        questions.append([compiler, "--version"])
    # Both at once: every build asks.
    version, *rest = parallel.run_all(lambda argv: run(argv).stdout, questions, workers=2)
    return Tools(version.strip(), rest[0].partition("\n")[0] if rest else "")


def build_key(package: Package, exclude_newer: str, tools: Tools) -> str:
    """Return the key of the wheel that building ``package`` gives: equal keys, equal wheels."""
    parts = {
        "archive": str(package.digest),
        "env": settings(package),
        "exclude-newer": exclude_newer,
        "tools": [tools.python, tools.compiler],
        "revision": REVISION,
    }
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def settings(package: Package) -> list[list[str]]:
    """Return the variables that the lock gives to the build of a package."""
    return [list(pair) for pair in package.build.env] if package.build is not None else []


def recall(store: Store, key: str) -> BuiltWheel | None:
    """Return the wheel of a key when it was built before and is in the store."""
    match store.recall(_KIND, key):
        case {"file": str(file), "digest": str(digest), "size": int(size)}:
            wheel = BuiltWheel(file, Digest.parse(digest), size)
            return wheel if store.has(wheel.digest, wheel.size) else None
        case _:
            return None


def remember(store: Store, key: str, wheel: BuiltWheel) -> None:
    """Remember the wheel of a key."""
    store.remember(_KIND, key, {"file": wheel.file, "digest": str(wheel.digest), "size": wheel.size})
