from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from envbuilder.errors import InputError
from envbuilder.spec.catalog import Catalog, UnknownEnvironmentError, find_catalog
from envbuilder.spec.environment import read_environment
from envbuilder.spec.recipe import DebianBase, ImageBase, read_recipe
from envbuilder.tomlread import TomlError
from tests.specs import spec_head

if TYPE_CHECKING:
    from pathlib import Path

GOOD = (
    spec_head("Test", "3.12")
    + """\
requires = ["torch==2.7.1", "ray[data]>=2"]
pins = "pins.txt"
[build.psutil]
reason = "no wheel"
env = { A = "1" }
[protected]
packages = ["Torch"]
[[deviation]]
package = "b_b"
published = "2"
ours = "3"
reason = "clash"
[[deviation]]
package = "c"
published = "3"
reason = "of the operating system"
[extras.flash-attn]
requires = ["flash-attn==2.8.3"]
wheel = "https://example.invalid/{version}+cu{cuda-major}torch{torch-minor}abi{abi}-cp{py}.whl"
reason = "needs nvcc"
[smoke]
imports = ["torch"]
"""
)
PINS = "# from somewhere\na==1  # why\n\nB.b==2\nc==3\ntorch==2.0\n"


def write(tmp_path: Path, text: str = GOOD, pins: str = PINS) -> Path:
    (tmp_path / "pins.txt").write_text(pins)
    file = tmp_path / "env-v1.toml"
    file.write_text(text)
    return file


def test_everything_is_read(tmp_path: Path):
    environment = read_environment(write(tmp_path))
    assert environment.name == "env-v1"
    assert environment.cuda == "12.6"
    assert environment.protected == ("torch",)
    assert environment.glibc == "2.35"
    assert dict(environment.builds[0].env) == {"A": "1"}
    assert [(p.name, p.version, p.line) for p in environment.pins] == [
        ("a", "1", 2), ("b-b", "2", 4), ("c", "3", 5), ("torch", "2.0", 6),
    ]  # fmt: skip


def test_pins_are_required_as_deviations_say(tmp_path: Path):
    """Our version where we deviate, nothing where the package is absent, and `requires` over the pins."""
    assert read_environment(write(tmp_path)).wanted() == ("torch==2.7.1", "ray[data]>=2", "a==1", "b-b==3")


@pytest.mark.parametrize(
    ("old", "new", "place", "reason"),
    [
        ('status = "supported"', 'status = "suported"', "status", "not one of"),
        ('python = "3.12"', "python = 3.12", "python", "must be a string"),
        ('python = "3.12"', 'python = "3.12.1"', "python", "minor version"),
        ('version = "12.6"', 'version = "12"', "cuda.version", "CUDA version"),
        ('["1xA10"]', '["1xA10", "1xA100"]', "gpu.accelerators[1]", "unknown accelerator"),
        ('"ray[data]>=2"', '"ray[data>=2"', "packages.requires[1]", "is not valid"),
        ('title = "Test"', 'title = "Test"\ncolour = "red"', "colour", "unknown key"),
        ('reason = "clash"', 'reason = "clash"\nreasons = "x"', "deviation[0].reasons", "unknown key"),
        ('published = "2"', 'published = "9"', "deviation[0].published", "the pins say 2"),
        ('package = "c"', 'package = "d"', "deviation[1].package", "not in the pins"),
        (
            'package = "c"\npublished = "3"',
            'package = "b.b"\npublished = "2"',
            "deviation[1].package",
            "a second deviation",
        ),
        ('pins = "pins.txt"', 'pins = "pin.txt"', "packages.pins", "cannot be read"),
        ("{abi}", "{abbi}", "extras.flash-attn.wheel", "unknown key"),
        ('env = { A = "1" }', "env = { A = 1 }", "build.psutil.env.A", "must be a string"),
        ("released = 2025-08-13", "", "released", "is missing"),
    ],
)
def test_bad_input_names_the_place(tmp_path: Path, old: str, new: str, place: str, reason: str):
    assert old in GOOD
    with pytest.raises(TomlError) as caught:
        read_environment(write(tmp_path, GOOD.replace(old, new)))
    assert caught.value.place == place
    assert reason in caught.value.reason
    assert caught.value.exit_code == 2


def test_a_pins_row_that_is_no_pin_names_its_line(tmp_path: Path):
    with pytest.raises(TomlError, match=r"pins\.txt:2: `b>=1`"):
        read_environment(write(tmp_path, pins="a==1\nb>=1\n"))


def catalog(tmp_path: Path, **texts: str) -> Catalog:
    for folder in ("environments", "images", "lockfiles"):
        (tmp_path / folder).mkdir()
    for name, text in texts.items():
        file = write(tmp_path / "environments", text)
        file.rename(file.with_name(f"{name}.toml"))
    return Catalog(tmp_path)


def test_the_nearest_name_is_offered(tmp_path: Path):
    with pytest.raises(UnknownEnvironmentError) as caught:
        catalog(tmp_path, base=GOOD).environment("bse")
    assert caught.value.hint == "did you mean `base`?"


def test_an_environment_extends_one_that_extends_nothing(tmp_path: Path):
    found = catalog(
        tmp_path, a=GOOD, b=f'extends = "a"\n{GOOD}', c=f'extends = "b"\n{GOOD}', d=f'extends = "d"\n{GOOD}'
    )
    assert found.parent(found.environment("a")) is None
    parent = found.parent(found.environment("b"))
    assert parent is not None
    assert parent.name == "a"
    with pytest.raises(InputError, match="itself extends"):
        found.parent(found.environment("c"))
    with pytest.raises(InputError, match="cannot extend itself"):
        found.parent(found.environment("d"))


def test_the_catalog_is_found_from_below_and_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ENVBUILDER_CATALOG", raising=False)
    catalog(tmp_path, a=GOOD)
    (tmp_path / "x" / "y").mkdir(parents=True)
    assert find_catalog(tmp_path / "x" / "y").root == tmp_path
    assert "ai-v4" in find_catalog(tmp_path.parent).names(), "the catalog that is shipped"
    monkeypatch.setenv("ENVBUILDER_CATALOG", str(tmp_path / "x"))
    with pytest.raises(InputError, match="no folder `environments`"):
        find_catalog(tmp_path)


RECIPE = """
[base]
debian = ["bash"]
[python]
from = ["managed", "host"]
[paths]
python = "/opt/python"
environment = "/opt/env"
[layering]
alone-mib = 8
buckets = 8
budget = 60
"""


def test_recipes(tmp_path: Path):
    file = tmp_path / "default.toml"
    file.write_text(RECIPE)
    recipe = read_recipe(file)
    assert recipe.base == DebianBase(None, ("bash",))
    assert recipe.layering.alone == 8 << 20
    file.write_text(RECIPE.replace('debian = ["bash"]', 'image = "r.example/x@sha256:00"'))
    assert read_recipe(file).base == ImageBase("r.example/x@sha256:00")


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"managed"', '"manged"', "python.from[0]"),
        ('["managed", "host"]', "[]", "python.from"),
        ('"/opt/env"', '"opt/env"', "paths.environment"),
        ('"/opt/env"', '"/opt/../env"', "paths.environment"),
        ("buckets = 8", "buckets = 0", "layering.buckets"),
        ("buckets = 8", 'buckets = 8\ncompression = "gz"', "layering.compression"),
        ('debian = ["bash"]', 'debian = ["bash"]\nsuit = "x"', "base.suit"),
    ],
)
def test_bad_recipes(tmp_path: Path, old: str, new: str, place: str):
    file = tmp_path / "default.toml"
    file.write_text(RECIPE.replace(old, new))
    with pytest.raises(TomlError) as caught:
        read_recipe(file)
    assert caught.value.place == place
