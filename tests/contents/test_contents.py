"""What finds faults in images finds them: small environments that are wrong in one way each."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from envbuilder.tomlread import TomlError
from tests.contents import records
from tests.contents.facts import Attempt, Failure, read_facts, unexplained
from tests.contents.modules import offered
from tests.contents.trees import Difference, Pair, launched, typeless_members

INSIDE = Path(__file__).with_name("inside")
SITE = "lib/python3.12/site-packages"
LAUNCHER = """#!{python}
import sys
from demo.cli import main
if __name__ == '__main__':
    {extra}
    sys.exit(main.run())
"""


def environment(folder: Path, *, files: dict[str, bytes] | None = None, name: str = "demo-1.0") -> Path:
    """Make a virtual environment with one distribution whose RECORD is right."""
    site = folder / SITE
    files = {"demo/__init__.py": b"X = 1\n", "demo/cli.py": b"", "../../../bin/demo": b"#!x\n"} | (files or {})
    files[f"{name}.dist-info/INSTALLER"] = b"envbuilder\n"
    rows = []
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        value = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.append(f"{path},sha256={value},{len(data)}\n")
    (site / f"{name}.dist-info" / "RECORD").write_text("".join([*rows, f"{name}.dist-info/RECORD,,\n"]))
    return folder


def test_a_right_record_has_no_problems(tmp_path: Path):
    root = environment(tmp_path)
    assert records.problems(root, root / SITE) == []


def test_what_record_does_not_state_as_it_is_is_found(tmp_path: Path):
    root = environment(tmp_path)
    site = root / SITE
    (site / "demo" / "cli.py").write_bytes(b"changed")
    (site / "demo" / "__init__.py").unlink()
    (site / "stray.py").write_bytes(b"")
    assert records.problems(root, site) == [
        f"{SITE}/demo/__init__.py: is missing, though demo-1.0.dist-info states it",
        f"{SITE}/demo/cli.py: is not what the RECORD of demo-1.0.dist-info states",
        f"{SITE}/stray.py: belongs to no distribution",
    ]


def test_two_distributions_must_not_state_different_contents_of_a_file(tmp_path: Path):
    environment(tmp_path, name="other-1.0", files={"demo/cli.py": b"another"})
    root = environment(tmp_path)
    assert records.problems(root, root / SITE) == [
        f"{SITE}/demo/cli.py: demo-1.0.dist-info and other-1.0.dist-info state different contents"
    ]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(environment(tmp_path / "ours"), "/opt/env", environment(tmp_path / "theirs"))


def kinds(pair: Pair) -> list[tuple[str, str | None]]:
    return [(difference.path, pair.kind(difference, {"odd.py"})) for difference in pair.differences()]


def test_equal_environments_do_not_differ(pair: Pair):
    (pair.ours / SITE / "demo" / "some.pyc").write_bytes(b"bytecode is compared otherwise")
    assert pair.differences() == []


def test_known_kinds_of_differences_are_told(pair: Pair):
    ours, theirs = pair.ours, pair.theirs
    (theirs / "bin" / "activate").write_text("")
    (theirs / SITE / "demo-1.0.dist-info" / "REQUESTED").write_text("")
    (theirs / SITE / "demo-1.0.dist-info" / "INSTALLER").write_text("uv")
    with (theirs / SITE / "demo-1.0.dist-info" / "RECORD").open("a") as file:
        file.write("demo/__pycache__/cli.cpython-312.pyc,,\n../../../bin/demo,sha256=x,1\n")
    for path in (ours, theirs):
        (path / SITE / "odd.py").write_text("")
    (theirs / SITE / "odd.py").chmod(0o755)
    for root, python, extra in ((ours, "/opt/env/bin/python", "pass"), (theirs, f"{theirs}/bin/python3", "x = 1")):
        (root / "bin" / "demo").write_text(LAUNCHER.format(python=python, extra=extra))
        (root / "bin" / "plain").write_text(f"#!{python}\nprint()\n")
    assert kinds(pair) == [
        ("bin/activate", "frame"),
        ("bin/demo", "launcher"),
        ("bin/plain", "interpreter"),
        (f"{SITE}/demo-1.0.dist-info/INSTALLER", "installer"),
        (f"{SITE}/demo-1.0.dist-info/RECORD", "record"),
        (f"{SITE}/demo-1.0.dist-info/REQUESTED", "origin"),
        (f"{SITE}/odd.py", "typeless"),
    ]


def test_any_other_difference_is_of_no_kind(pair: Pair):
    ours, theirs = pair.ours, pair.theirs
    (theirs / SITE / "demo" / "cli.py").write_bytes(b"changed")
    (theirs / SITE / "demo" / "__init__.py").chmod(0o755)
    (ours / SITE / "more.py").write_bytes(b"")
    (theirs / SITE / "missing.py").write_bytes(b"")
    (ours / "bin" / "link").symlink_to("demo")
    (theirs / "bin" / "link").write_text("")
    (theirs / SITE / "demo-1.0.dist-info" / "RECORD").write_text("demo/cli.py,sha256=other,1\n")
    (ours / "bin" / "demo").write_text(LAUNCHER.format(python="/usr/bin/python", extra="pass"))
    found = kinds(pair)
    assert len(found) == 7
    assert {kind for _, kind in found} == {None}
    assert Difference("bin/link", "link") in pair.differences()


def test_a_launcher_is_known_by_what_it_calls():
    assert launched(LAUNCHER.format(python="x", extra="pass").encode()) == ("demo.cli", "main.run")
    assert launched(b"#!/bin/sh\necho\n") is None


def test_members_without_a_type_are_found_in_wheels(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "demo.whl", "w") as archive:
        for name, mode in (("typeless.py", 0o755), ("regular.py", 0o100755), ("plain.py", 0o100644)):
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, b"")
    assert typeless_members([tmp_path / "demo.whl"]) == {"typeless.py"}


def test_modules_are_those_at_the_top_and_in_namespaces(tmp_path: Path):
    root = environment(
        tmp_path,
        files={
            "demo/inner/deep.py": b"",
            "single.py": b"",
            "_native.cpython-312-x86_64-linux-gnu.so": b"",
            "space/part/__init__.py": b"X = 1",
            "space/part/deep.py": b"",
            "space/lone.py": b"",
            "idle/__init__.py": b'"""Nothing."""\n__path__ = __import__("pkgutil").extend_path(__path__, __name__)\n',
            "idle/child/__init__.py": b"",
            "idle/child/deep.py": b"",
            "not-a-name/x.py": b"",
            "demo.libs/libx.so": b"",
            "data/file.txt": b"",
        },
    )
    assert offered(root / SITE).keys() == {
        "demo", "single", "_native", "space.part", "space.lone", "idle", "idle.child",
    }  # fmt: skip


def test_failures_are_compared_with_what_is_known_both_ways():
    known = [Failure(name, "driver", "no driver", "") for name in ("fails", "changed", "works", "gone")]
    attempts = [
        Attempt("fine", 0, 1.0, ""),
        Attempt("fails", 1, 1.0, "... no driver ..."),
        Attempt("changed", 1, 1.0, "something else"),
        Attempt("works", 0, 1.0, ""),
        Attempt("new", None, 60.0, "waiting"),
    ]
    assert unexplained(attempts, known) == [
        "changed: ended with 1 after 1.0 s:\nsomething else",
        "works: is known to fail (driver), but works",
        "new: took too long after 60.0 s:\nwaiting",
        "gone: is known to fail, but was not there to be tried",
    ]


def test_facts_name_a_cause_that_is_known(tmp_path: Path):
    assert read_facts().imports
    (tmp_path / "facts.toml").write_text('[[import]]\nnames = ["x"]\ncause = "mood"\nsays = "no"\nreason = ""\n')
    with pytest.raises(TomlError, match="cause: must be one of"):
        read_facts(tmp_path / "facts.toml")


def test_attempts_are_separate_and_limited(tmp_path: Path):
    jobs = [
        ["fine", [sys.executable, "-c", "print('yes')"], 60],
        ["fails", [sys.executable, "-c", "raise SystemExit(3)"], 60],
        ["hangs", ["sleep", "60"], 0.2],
        ["missing", ["./nothing"], 60],
    ]
    (tmp_path / "jobs").write_text(json.dumps(jobs))
    subprocess.run([sys.executable, INSIDE / "attempts.py", "out", "jobs"], cwd=tmp_path, check=True)
    found = [Attempt(**one) for one in json.loads((tmp_path / "out").read_text())]
    assert [(one.name, one.code) for one in found] == [("fine", 0), ("fails", 3), ("hangs", None), ("missing", 126)]
    assert found[0].output == "yes\n"


def test_bytecode_that_is_not_its_sources_is_found(tmp_path: Path):
    names = ("right", "changed", "timed", "bare", "elsewhere", "tampered")
    for name in names:
        (tmp_path / f"{name}.py").write_text("X = 1\n")
    (tmp_path / "broken.py").write_text("X =\n")
    compile_all = "import compileall, py_compile, sys; mode = py_compile.PycInvalidationMode.UNCHECKED_HASH; "
    compile_all += (
        "[py_compile.compile(n + '.py', dfile=f'{sys.argv[1]}/{n}.py', invalidation_mode=mode) for n in sys.argv[2:]]"
    )
    subprocess.run([sys.executable, "-c", compile_all, tmp_path, *names], cwd=tmp_path, check=True)
    (tmp_path / "changed.py").write_text("X = 2\n")
    tag = sys.implementation.cache_tag
    cache = tmp_path / "__pycache__"
    (cache / f"bare.{tag}.pyc").unlink()
    right = (cache / f"right.{tag}.pyc").read_bytes()
    (cache / f"timed.{tag}.pyc").write_bytes(right[:4] + bytes(12) + right[16:])
    (cache / f"elsewhere.{tag}.pyc").write_bytes(right)
    (cache / f"gone.{tag}.pyc").write_bytes(right)
    other = (cache / f"changed.{tag}.pyc").read_bytes()
    tampered = (cache / f"tampered.{tag}.pyc").read_bytes()
    (cache / f"tampered.{tag}.pyc").write_bytes(tampered.replace(b"X", b"Y"))
    assert other[:16] == right[:16]
    out = tmp_path / "out"
    subprocess.run([sys.executable, INSIDE / "bytecode.py", out, "1", tmp_path], check=True)
    problems = json.loads(out.read_text())["problems"]
    assert [problem.removeprefix(f"{tmp_path}/").split(":")[0] for problem in problems] == [
        "bare.py", "changed.py", "elsewhere.py", "tampered.py", "timed.py", f"__pycache__/gone.{tag}.pyc",
    ]  # fmt: skip
