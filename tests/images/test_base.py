from __future__ import annotations

import dataclasses
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.cli.build import read_source
from envbuilder.errors import HostError
from envbuilder.images.assemble import Made, Origin, assemble
from envbuilder.images.base import (
    BaseUnfitError,
    PulledBase,
    check_base,
    check_depth,
    check_layers,
    look_into,
    shortcomings,
)
from envbuilder.images.build import Source, _own_python
from envbuilder.lock.drift import lock_input, lock_target
from envbuilder.lock.model import Lock
from envbuilder.oci.blob import Compression
from envbuilder.oci.layer import Symlink
from envbuilder.oci.model import LAYER_GZIP, LAYER_TAR, LAYER_ZSTD, History
from envbuilder.spec.catalog import Catalog
from envbuilder.spec.environment import read_environment
from envbuilder.spec.recipe import ImageBase, read_recipe
from envbuilder.store.store import Store
from envbuilder.store.unpack import UnpackError
from envbuilder.system.debian import SystemPlan
from envbuilder.system.pythons import NoInterpreterError, OwnPython, find_interpreter
from tests.images.bases import DOCKER_LAYER, FOLDER, Plan, file, libc, python, system
from tests.images.test_build import RECIPE, SPEC, WHEELS, package_of
from tests.smallimage import put_layer

if TYPE_CHECKING:
    from envbuilder.oci.layer import Entry

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
MACHINE = platform.machine()
NAME = "registry.example/base:1"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def look(store: Store, plan: Plan) -> PulledBase:
    image = plan.put(store)
    return look_into(NAME, image.digest, image, MACHINE, store)


def look_at(store: Store, *layers: list[Entry], **process: object) -> PulledBase:
    return look(store, Plan(layers, process))


# -- does it fit --------------------------------------------------------------------------------------------------


def test_a_base_says_what_it_is(store: Store):
    base = look_at(store, system(*python("usr", "3.12")))
    assert (base.distribution, base.suite, base.glibc) == ("duck", "mallard", "2.36")
    check_base(base, "2.36", ["/opt/env", "/opt/python"])
    assert shortcomings(base) == ()


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (system(version="2.31"), r"duck mallard\) has glibc 2\.31, but the lock's wheels need 2\.35"),
        ([file("lib/ld-musl-x86_64.so.1"), file("etc/os-release", b"ID=alpine\n")], r"\(alpine\) has musl instead"),
        ([file("app")], f"has no glibc for {MACHINE}"),
        ([file("lib/libc.so.6", libc(machine=3))], f"has no glibc for {MACHINE}"),
        ([file("lib64/libc.so.6", b"\x7fELF" + bytes(14) + b"\x3e\0")], "cannot be told"),
        (system(file("opt/env/pyvenv.cfg")), "has something at /opt/env already"),
        (system(Symlink("opt/env", "/usr/env")), "has something at /opt/env already"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(store: Store, entries: list[Entry], reason: str):
    with pytest.raises(BaseUnfitError, match=reason) as caught:
        check_base(look_at(store, entries), "2.35", ["/opt/env"])
    assert caught.value.exit_code == 4
    assert caught.value.message.startswith(NAME)


def test_the_glibc_is_the_one_of_the_uppermost_layer(store: Store):
    upgraded = look_at(store, system(version="2.31"), [file(f"{FOLDER}/libc.so.6", libc("2.39"))])
    assert upgraded.glibc == "2.39"
    older = look_at(
        store, [file(f"lib/{MACHINE}-linux-gnu/libc-2.31.so", libc("2.31")), Symlink("lib64/libc.so.6", "libc-2.31.so")],
        [file("lib64/.wh.libc.so.6"), Symlink(f"lib/{MACHINE}-linux-gnu/libc.so.6", "libc-2.31.so")],
    )  # fmt: skip
    assert older.glibc == "2.31"


def test_what_is_missing_is_said_and_nothing_else(store: Store):
    bare = look_at(
        store, [file("usr/lib64/libc.so.6", libc())],
        Env=["PYTHONPATH=/opt/lib", "LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/cuda/lib64"],
    )  # fmt: skip
    found = shortcomings(bare)
    assert [text.split(" (")[0].split(":")[0] for text in found] == [
        "has no certificates of authorities", "has no libstdc++.so.6", "has no libgcc_s.so.1", "has no libz.so.1",
        "has no C compiler, which Triton and torch.compile need at run time", "has no shell",
        "sets PYTHONPATH, which would lead to its own packages and is left out",
        "sets LD_LIBRARY_PATH to /usr/local/cuda/lib64",
    ]  # fmt: skip


def test_headers_are_missed_only_with_the_bases_own_python(store: Store):
    base = look_at(store, system(*python("usr", "3.12")))
    assert shortcomings(base) == shortcomings(base, "3.13") == ()
    assert shortcomings(base, "3.12") == (
        "has no headers of its Python 3.12 (Python.h), which Triton and torch.compile need",
    )
    complete = look_at(store, system(*python("usr", "3.12"), file("usr/include/python3.12/Python.h")))
    assert shortcomings(complete, "3.12") == ()


def test_layers_that_registries_do_not_hand_out_are_refused(store: Store):
    kind = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
    with pytest.raises(BaseUnfitError, match=kind.replace(".", r"\.").replace("+", r"\+")):
        check_layers(Plan([system()], media_type=kind).put(store), NAME)


def test_a_layer_that_is_not_what_the_configuration_says_is_refused(store: Store):
    image = Plan([system()]).put(store)
    lying = dataclasses.replace(image.config, diff_ids=(image.digest,))
    with pytest.raises(UnpackError, match=f"not to {image.digest}"):
        look_into(NAME, image.digest, dataclasses.replace(image, config=lying), MACHINE, store)


def test_more_layers_than_engines_stack_are_refused(store: Store):
    base = look_at(store, system(), [file("srv/x")])
    check_depth(base, 123)
    with pytest.raises(BaseUnfitError, match="has 2 layers, and with the environment's 124 they are more than 125"):
        check_depth(base, 124)


# -- its own Python -----------------------------------------------------------------------------------------------


def test_its_python_is_the_first_on_its_path_with_a_library(store: Store):
    docker = look_at(store, system(*python("usr", "3.11"), *python("usr/local", "3.12")))
    assert docker.python("3.12") == OwnPython("/usr/local")
    assert docker.python("3.11") == OwnPython("/usr")
    conda = look_at(store, system(*python("opt/conda", "3.12")), Env=["PATH=/opt/conda/bin:/usr/bin"])
    assert conda.python("3.12") == OwnPython("/opt/conda")
    linked = look_at(store, system(*python("opt/py", "3.12"), Symlink("usr/bin/python3.12", "/opt/py/bin/python3.12")))
    assert linked.python("3.12") == OwnPython("/opt/py")
    fedora = look_at(store, system(file("usr/bin/python3.13"), file("usr/lib64/python3.13/os.py")))
    assert fedora.python("3.13") == OwnPython("/usr")


def test_a_base_without_the_right_python_is_refused_or_passed_over(store: Store):
    base = look_at(store, system(*python("usr", "3.11"), file("usr/local/bin/python3.12")))
    own = base.python("3.12")
    assert own.prefix is None
    assert own.lacking.endswith("it has 3.11, 3.12")
    with pytest.raises(NoInterpreterError, match=r"base: .* has no whole Python 3\.12") as caught:
        find_interpreter("3.12", ["base"], store, own=own)
    assert caught.value.exit_code == 4
    assert "take a base that has Python 3.12" in str(caught.value.hint)
    environ = {"ENVBUILDER_PYTHON": sys.executable, "PATH": ""}
    passed = find_interpreter(MINOR, ["base", "host"], store, own=base.python(MINOR + "9"), environ=environ)
    assert passed.kind == "host"


def test_the_python_of_a_base_of_packages_is_looked_for_too(store: Store, tmp_path: Path):
    (tmp_path / "small.toml").write_text(SPEC)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('["host"]', '["base"]'))
    environment = read_environment(tmp_path / "small.toml")
    lock = Lock("small", lock_input(environment), lock_target(environment), "12.6", ())
    source = Source(environment, lock, None, read_recipe(tmp_path / "recipe.toml"))
    plan = SystemPlan("mallard", "duck", ())
    found = _own_python(source, plan, put_layer(store, python("usr", MINOR)), store)
    assert found == OwnPython("/usr")
    found = _own_python(source, plan, put_layer(store, python("usr", "3.1")), store)
    assert found is not None
    assert found.lacking.startswith(f"the recipe's base (duck mallard) has no whole Python {MINOR}")


def test_another_base_is_another_question(store: Store):
    found = [find_interpreter("3.12", ["base"], store, own=OwnPython(f"/{name}")).prefix for name in ("usr", "opt/py")]
    assert [str(path) for path in found] == ["/usr", "/opt/py"]
    with pytest.raises(HostError):
        find_interpreter("3.12", ["base"], store, own=OwnPython(None, "has none"))


def test_the_command_line_puts_an_image_in_the_place_of_the_recipes_base():
    catalog = Catalog(Path(__file__).parents[2])
    source = read_source(catalog, "base-v4", base="debian:bookworm")
    assert (source.recipe.base, source.system) == (ImageBase("debian:bookworm"), None)
    assert source.recipe.interpreter == read_source(catalog, "base-v4").recipe.interpreter


# -- the image on top ---------------------------------------------------------------------------------------------


PROCESS = {
    "Env": [
        "PATH=/opt/tool/bin:/usr/bin", "PYTHONHOME=/usr", "TOOL=1", "GREETING=base", "NVIDIA_REQUIRE_CUDA=cuda>=99",
    ],
    "Labels": {"maintainer": "somebody", "org.opencontainers.image.title": "base", "dev.envbuilder.cuda": "1.0"},
    "Entrypoint": ["/entry"], "Cmd": ["serve"], "User": "worker", "WorkingDir": "/srv",
}  # fmt: skip
HISTORY: list[dict[str, object]] = [
    {"created": "2019-01-01T00:00:00Z", "created_by": "ADD root.tar /"},
    {"created": "2020-01-01T00:00:00Z", "created_by": "ENV TOOL=1", "empty_layer": True},
    {"created_by": "RUN more", "comment": "buildkit"},
]


def on_top(base: PulledBase, folder: Path, recipe: str = RECIPE, python: str = "/opt/python"):
    (folder / "small.toml").write_text(SPEC)
    (folder / "recipe.toml").write_text(recipe)
    environment = read_environment(folder / "small.toml")
    own = put_layer(Store(folder / "store"), [file("opt/env/x")])
    origin = Origin("duck mallard", "host 3.12.1", python, base)
    packages = tuple(package_of(made) for made in sorted(WHEELS, key=lambda made: made.file))
    lock = Lock("small", lock_input(environment), lock_target(environment), "12.6", packages)
    return assemble(environment, lock, read_recipe(folder / "recipe.toml"), origin, [Made(own, "x")])


def test_the_image_begins_with_the_base(store: Store, tmp_path: Path):
    compressions = [Compression.GZIP, Compression.ZSTD, Compression.NONE]
    plan = Plan([system(), [file("usr/bin/.wh.gcc")], [file("srv/x")]], compressions=compressions)
    base = look(store, plan)
    image = on_top(base, tmp_path)
    assert image.manifest.layers[:3] == base.image.manifest.layers
    assert [layer.media_type for layer in image.manifest.layers] == [LAYER_GZIP, LAYER_ZSTD, LAYER_TAR, LAYER_GZIP]
    assert image.config.diff_ids[:3] == base.image.config.diff_ids
    assert len(image.config.layer_history) == len(image.config.diff_ids) == 4


def test_dockers_media_types_become_those_of_oci(store: Store, tmp_path: Path):
    base = look(store, Plan([system()], media_type=DOCKER_LAYER))
    image = on_top(base, tmp_path)
    assert [layer.media_type for layer in image.manifest.layers] == [LAYER_GZIP, LAYER_GZIP]
    assert image.manifest.layers[0].digest == base.image.manifest.layers[0].digest


def test_the_configurations_are_joined(store: Store, tmp_path: Path):
    base = look(store, Plan([system(), [file("srv/x")]], PROCESS, history=HISTORY))
    config = on_top(base, tmp_path).config
    assert config.env["PATH"] == "/opt/env/bin:/opt/python/bin:/opt/tool/bin:/usr/bin"
    assert (config.env["TOOL"], config.env["GREETING"]) == ("1", "hello")
    assert config.env["NVIDIA_REQUIRE_CUDA"] == "cuda>=12.0"
    assert "PYTHONHOME" not in config.env
    assert config.labels["maintainer"] == "somebody"
    assert config.labels["org.opencontainers.image.title"] == "small"
    assert config.labels["dev.envbuilder.cuda"] == "12.6"
    assert config.labels["dev.envbuilder.system"] == "duck mallard"
    assert (config.user, config.working_dir, config.entrypoint, config.cmd) == ("worker", "/srv", (), ())
    assert config.history == (
        History("ADD root.tar /", created="2019-01-01T00:00:00Z"),
        History("ENV TOOL=1", created="2020-01-01T00:00:00Z", empty=True),
        History("RUN more", "buildkit", created="2020-01-01T00:00:00Z"),
        History("envbuilder: x"),
    )


def test_the_recipe_has_the_last_word(store: Store, tmp_path: Path):
    base = look(store, Plan([system()], PROCESS))
    process = '[process]\nuser = "root"\nworking-dir = "/root"\ncmd = ["bash"]\n'
    config = on_top(base, tmp_path, RECIPE.replace("[process.env]", process + "[process.env]")).config
    assert (config.user, config.working_dir, config.cmd) == ("root", "/root", ("bash",))


def test_where_the_image_comes_from_is_on_it(store: Store, tmp_path: Path):
    base = look_at(store, system())
    image = on_top(base, tmp_path)
    for facts in (image.config.labels, image.manifest.annotations):
        assert facts["org.opencontainers.image.base.name"] == NAME
        assert facts["org.opencontainers.image.base.digest"] == str(base.digest)


def test_the_interpreters_programs_are_on_the_path_once(store: Store, tmp_path: Path):
    base = look_at(store, system())
    assert on_top(base, tmp_path, python="/usr/local").config.env["PATH"] == f"/opt/env/bin:{base.path}"


@pytest.mark.parametrize(
    ("entries", "env", "expected"),
    [
        ([file("etc/ssl/certs/ca-certificates.crt")], [], "/etc/ssl/certs/ca-certificates.crt"),
        ([file("etc/pki/tls/certs/ca-bundle.crt")], [], "/etc/pki/tls/certs/ca-bundle.crt"),
        ([file("etc/pki/tls/certs/ca-bundle.crt")], ["SSL_CERT_FILE=/srv/ca.pem"], "/srv/ca.pem"),
        ([], [], None),
    ],
)
def test_certificates_are_looked_for_where_the_base_has_them(
    store: Store, tmp_path: Path, entries: list[Entry], env: list[str], expected: str | None
):
    base = look_at(store, [file("usr/lib64/libc.so.6", libc()), *entries], Env=env)
    assert on_top(base, tmp_path).config.env.get("SSL_CERT_FILE") == expected


def test_a_history_that_does_not_fit_the_layers_is_not_believed(store: Store, tmp_path: Path):
    base = look(store, Plan([system(), [file("srv/x")]], history=HISTORY[:2]))
    assert [entry.created_by for entry in on_top(base, tmp_path).config.history] == ["", "", "envbuilder: x"]
