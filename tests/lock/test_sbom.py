from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from envbuilder.lock import sbom
from envbuilder.lock.files import read_lock
from envbuilder.lock.model import Build, Lock, LockInput, Package, Target
from envbuilder.oci.digest import Digest

LOCKS = sorted((Path(__file__).parents[2] / "lockfiles").glob("*.lock.toml"))
SUBJECT = sbom.Component("container", "small", "1", "image:small")


def package(name: str, *requires: str, version: str = "1.0") -> Package:
    return Package(name, version, f"{name}-{version}-py3-none-any.whl", Digest.of(name.encode()), 10, requires)


def lock_of(*packages: Package, requires: tuple[str, ...] = ()) -> Lock:
    echo = LockInput(None, "2026-01-01T00:00:00Z", requires, (), (), ())
    return Lock("small", echo, Target("3.12", "x86_64", "2.35"), "12.6", packages)


def parsed(lock: Lock) -> dict[str, dict[str, Any]]:
    document = json.loads(sbom.format_sbom(SUBJECT, sbom.package_components(lock)))
    return {"components": {c["name"]: c for c in document["components"]}} | {
        "dependencies": {d["ref"]: d.get("dependsOn", []) for d in document["dependencies"]}
    }


def check_schema(data: bytes) -> None:
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(data.decode())
    assert error is None, error


def test_a_document_is_valid_by_the_official_schema():
    smallest = min(LOCKS, key=lambda file: file.stat().st_size)
    parts = [*sbom.package_components(read_lock(smallest)), sbom.python_component("3.12.1")]
    check_schema(sbom.format_sbom(SUBJECT, parts))


@pytest.mark.parametrize("file", LOCKS, ids=lambda file: file.name)
def test_the_documents_of_the_committed_locks_are_closed(file: Path):
    lock = read_lock(file)
    data = sbom.format_sbom(SUBJECT, [*sbom.package_components(lock), sbom.python_component("3.12.1")])
    document = json.loads(data)
    assert len(document["components"]) == len(lock.packages) + 1
    references = {c["bom-ref"] for c in document["components"]}
    for row in document["dependencies"]:
        assert set(row.get("dependsOn", ())) <= references


def test_a_component_is_found_by_purl_and_hash():
    torch = package("torch", version="2.7.1+cu126")
    found = parsed(lock_of(torch))["components"]["torch"]
    assert found["purl"] == "pkg:pypi/torch@2.7.1%2Bcu126"
    assert found["hashes"] == [{"alg": "SHA-256", "content": torch.digest.hex}]
    assert found["properties"] == [{"name": "envbuilder:file", "value": torch.file}]


def test_built_packages_say_that_the_hash_is_of_their_source():
    built = replace(package("psutil"), file="psutil-1.0.tar.gz", build=Build(()))
    found = parsed(lock_of(built))["components"]["psutil"]
    assert {"name": "envbuilder:built-from-source", "value": "true"} in found["properties"]


def test_the_graph_keeps_what_holds_on_the_target_and_was_asked_for():
    lock = lock_of(
        package("app", "lib[fast]>=1", 'old; python_version < "3.8"', 'win; sys_platform == "win32"', "absent"),
        package("lib", 'quick; extra == "fast"', 'slow; extra == "other"', 'arm; platform_machine == "aarch64"'),
        package("loop", "ring"),
        package("ring", "loop", "ring[x]"),
        package("root", 'quick; extra == "speed"'),
        *(package(name) for name in ("arm", "old", "quick", "slow", "win")),
        requires=("Root[speed]==1.0",),
    )
    edges = {name: needed for name, needed in sbom.graph(lock).items() if needed}
    assert edges == {"app": ("lib",), "lib": ("quick",), "loop": ("ring",), "ring": ("loop",), "root": ("quick",)}


def test_the_subject_depends_on_what_nothing_else_depends_on():
    found = parsed(lock_of(package("app", "lib"), package("lib")))["dependencies"]
    assert found == {
        "image:small": ["pkg:pypi/app@1.0"],
        "pkg:pypi/app@1.0": ["pkg:pypi/lib@1.0"],
        "pkg:pypi/lib@1.0": [],
    }


def test_the_bytes_are_a_function_of_the_content():
    lock = lock_of(package("app", "lib"), package("lib"))
    parts = sbom.package_components(lock)
    data = sbom.format_sbom(SUBJECT, parts)
    assert sbom.format_sbom(SUBJECT, [*reversed(parts), parts[0]]) == data
    other = sbom.format_sbom(SUBJECT, parts[:1])
    serials = {json.loads(text)["serialNumber"] for text in (data, other)}
    assert len(serials) == 2
    assert data.endswith(b"}\n")


def test_purls_are_encoded():
    facts = {"arch": "amd64", "distro": "debian-12", "upstream": ""}
    assert (
        sbom.purl("deb/debian", "libstdc++6", "1:12.2.0-14+deb12u1~x", facts)
        == "pkg:deb/debian/libstdc%2B%2B6@1:12.2.0-14%2Bdeb12u1~x?arch=amd64&distro=debian-12"
    )
