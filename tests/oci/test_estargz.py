"""Layers as the reference implementation of eStargz reads them (Go, from Debian's packages)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import File, write_layer
from envbuilder.wheels.key import InstallPrefix, WheelFile
from envbuilder.wheels.layer import write_wheels
from tests.oci.test_layer import ENTRIES, deflated
from tests.wheelmaker import make_wheel

if TYPE_CHECKING:
    from envbuilder.oci.model import Layer

LIBRARY = Path("/usr/share/gocode/src/github.com/containerd/stargz-snapshotter/estargz")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("go") is None or not LIBRARY.exists(),
        reason="needs golang-go and golang-github-containerd-stargz-snapshotter-dev, 950 MB that nothing else here needs",
    ),
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("estargz") / "verify"
    env = os.environ | {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOCACHE": str(program.parent / "cache")}
    source = Path(__file__).parent / "estargz" / "verify.go"
    subprocess.run(["go", "build", "-o", str(program), str(source)], env=env, check=True)
    return program


def verified(verifier: Path, blob: Path, layer: Layer) -> str:
    done = subprocess.run([str(verifier), str(blob), str(layer.toc)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kind_of_entry(verifier: Path, tmp_path: Path):
    entries = [*ENTRIES, File("deflated", deflated(b"abc" * 1_000_000)), File("deflated-empty", deflated(b""))]
    with (tmp_path / "layer").open("wb") as out:
        layer = write_layer(entries, out)
    # A hard link counts as the file that it is.
    assert verified(verifier, tmp_path / "layer", layer).startswith("8 files, 6012002 bytes")


def test_many_files(verifier: Path, tmp_path: Path):
    with (tmp_path / "layer").open("wb") as out:
        layer = write_layer([File(f"folder/{n:05}", Bytes(b"%d" % n)) for n in range(20_000)], out)
    assert verified(verifier, tmp_path / "layer", layer).startswith("20001 files")


def test_wheels(verifier: Path, tmp_path: Path):
    made = make_wheel("thing", files={"thing/a.py": "x = 1\n" * 1000, "thing/b.bin": bytes(5_000_000)})
    with (tmp_path / "layer").open("wb") as out:
        wheel = WheelFile(made.file, made.digest, made.write(tmp_path))
        layer = write_wheels([wheel], InstallPrefix("/opt/env", "3.12"), None, out)
    verified(verifier, tmp_path / "layer", layer)
