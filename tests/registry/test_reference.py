from __future__ import annotations

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.registry.reference import NotAReferenceError, Reference, check_target

HEX = "ab" * 32
DIGEST = Digest(HEX)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("python", Reference("docker.io", "library/python")),
        ("python:3.12-slim", Reference("docker.io", "library/python", "3.12-slim")),
        ("team/app", Reference("docker.io", "team/app")),
        ("docker.io/python", Reference("docker.io", "library/python")),
        ("index.docker.io/team/app:v1", Reference("docker.io", "team/app", "v1")),
        ("registry-1.docker.io/python", Reference("docker.io", "library/python")),
        ("localhost/app", Reference("localhost", "app")),
        ("localhost:5000/app:v1", Reference("localhost:5000", "app", "v1")),
        ("host:5000/app", Reference("host:5000", "app")),
        ("host:5000", Reference("docker.io", "library/host", "5000")),
        ("[::1]:5000/app:v1", Reference("[::1]:5000", "app", "v1")),
        ("Registry.Test/app", Reference("registry.test", "app")),
        ("LOCALHOST/app", Reference("localhost", "app")),
        (f"registry.test/a/b/c@sha256:{HEX}", Reference("registry.test", "a/b/c", None, DIGEST)),
        (f"registry.test/a:v1@sha256:{HEX}", Reference("registry.test", "a", "v1", DIGEST)),
        ("registry.test/a__b/c--d.e_f/0", Reference("registry.test", "a__b/c--d.e_f/0")),
        (f"x:{'t' * 128}", Reference("docker.io", "library/x", "t" * 128)),
    ],
)
def test_parse(text: str, reference: Reference):
    assert Reference.parse(text) == reference
    assert Reference.parse(str(reference)) == reference


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no repository"),
        ("registry.test/", "names no repository"),
        ("https://registry.test/app", "begins with a scheme"),
        ("docker://registry.test/app", "begins with a scheme"),
        ("registry.test/App", "the repository `App` has capital letters"),
        ("registry.test/a//b", "a part of the repository `a//b` is empty"),
        ("registry.test/a/", "a part of the repository `a/` is empty"),
        ("registry.test/a/../b", r"`\.\.` in the repository"),
        ("registry.test/-a", "`-a` in the repository"),
        ("a..b/c", "`a..b` is no registry's host"),
        ("host:99999/app", "`host:99999` is no registry's host"),
        ("host:x/app", "`host:x` is no registry's host"),
        ("-host.test/app", "is no registry's host"),
        ("user:secret@registry.test/app", "is no digest"),
        ("app:", "the tag is empty"),
        ("app:-v1", "the tag `-v1` is not letters"),
        ("app:v 1", "the tag `v 1` is not letters"),
        ("app:v1\n", "is not letters"),
        (f"app:{'t' * 129}", "the tag is longer than 128"),
        ("app@sha256:12", "`sha256:12` is no digest"),
        (f"app@sha512:{HEX}{HEX}", "is no digest"),
        (HEX, "a bare digest names no repository"),
        ("a/" * 130 + "b", "longer than 255"),
    ],
)
def test_what_is_none_is_refused_with_the_place(text: str, reason: str):
    with pytest.raises(NotAReferenceError, match=reason) as caught:
        Reference.parse(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_target_and_changes():
    plain = Reference.parse("registry.test/app")
    assert plain.target == "latest"
    assert plain.name == "registry.test/app"
    tagged = plain.with_tag("v1")
    assert (tagged.target, str(tagged)) == ("v1", "registry.test/app:v1")
    fixed = tagged.with_digest(DIGEST)
    assert (fixed.target, str(fixed)) == (str(DIGEST), f"registry.test/app:v1@{DIGEST}")
    with pytest.raises(NotAReferenceError):
        plain.with_tag("v/1")


@pytest.mark.parametrize("target", ["../../tags", "", "sha256:12", "a/b", "v1?x"])
def test_a_target_cannot_leave_its_place_in_the_url(target: str):
    with pytest.raises(NotAReferenceError):
        check_target("registry.test/app", target)
