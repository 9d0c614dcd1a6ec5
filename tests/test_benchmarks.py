"""The pure parts of the benchmarks: what is measured with, and the tables. Nothing here is timed."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from dataclasses import replace

import pytest

from benchmarks.limit import Limits, Line, Rate, hash_all, members, shares
from benchmarks.measure import CommandFailedError, Measured, Runner
from benchmarks.tables import Results, Side, Step, copies_table, detail_table, main_table
from benchmarks.wheelset import changed, closure
from envbuilder.lock.model import Lock, LockInput, Package, Target
from envbuilder.oci.digest import Digest
from tests.wheelmaker import make_wheel


def package(name: str, *requires: str) -> Package:
    return Package(name, "1", f"{name}-1-py3-none-any.whl", Digest.of(name.encode()), 1, requires)


def lock(*packages: Package) -> Lock:
    echo = LockInput(None, "2026-01-01T00:00:00Z", (), (), (), ())
    return Lock("test", echo, Target("3.12", "x86_64", "2.35"), "12.6", packages)


def names(found: tuple[Package, ...]) -> list[str]:
    return [one.name for one in found]


def test_closure_follows_requirements_and_extras_and_leaves_out_what_is_for_others():
    graph = lock(
        package("app", "Lib_A[fast]>=1", 'old; python_version < "3.9"', 'gone; sys_platform == "win32"'),
        package("dev"), package("lib-a", 'speed; extra == "fast"', 'dev; extra == "dev"'), package("old"),
        package("speed", "app"), package("other"),
    )  # fmt: skip

    assert names(closure(graph, ["app"])) == ["app", "lib-a", "speed"]


def test_a_changed_wheel_differs_in_one_module_and_its_record_fits(tmp_path):
    wheel = make_wheel("demo", "1", files={"demo/__init__.py": "x = 1\n", "demo/b.py": "y = 2\n"}).write(tmp_path)
    target = tmp_path / "new.whl"

    now = changed(replace(package("demo"), file=wheel.name), wheel, target)

    assert (now.digest, now.size) == (Digest.of_file(target), target.stat().st_size)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target) as new:
        assert old.namelist() == new.namelist()
        differ = [name for name in old.namelist() if old.read(name) != new.read(name)]
        assert differ == ["demo/__init__.py", "demo-1.dist-info/RECORD"]
        data = new.read("demo/__init__.py")
        sum_of = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert f"demo/__init__.py,sha256={sum_of},{len(data)}\n" in new.read("demo-1.dist-info/RECORD").decode()


def test_members_and_shares_hold_everything_once(tmp_path):
    files = {"demo/big.bin": bytes(2 << 20), "demo/a.py": b"", "demo/b.py": b"b"}
    wheel = make_wheel("demo", "1", files=files).write(tmp_path)

    every = members([wheel])

    assert every[0].name == "demo/big.bin"
    assert every[0].inflated == 2 << 20
    dealt = shares(every, 2)
    assert dealt[0] == [every[0]]
    assert sorted(one.name for share in dealt for one in share) == sorted(one.name for one in every)
    hash_all(every)


def test_the_tables_show_medians_ratios_and_what_is_missing():
    results = Results()
    results.add(Side.OURS, Step.BUILD, *(Measured(wall, wall, 10**8, size=5 * 10**6) for wall in (1.0, 9.0, 2.0)))
    results.add(Side.OURS, Step.PUSH, Measured(2.0, 1.0, 10**7))
    results.add(Side.DOCKER, Step.BUILD, Measured(30.0, 1.0, 10**7))
    results.add(Side.DOCKER, Step.PUSH, Measured(50.0, 1.0, 10**7))

    table, detail = main_table(results), detail_table(results)

    assert "| **build + push** | 4.00 | 80.00 | 20.0 | n/a | n/a | 20 times docker |" in table
    assert "| pull, nothing cached | n/a | n/a | n/a | n/a | n/a |" in table
    assert "| envbuilder | 1.00, 9.00, 2.00 | 2.00 | 100 | 5.00 | 0.0 |" in detail


def test_an_image_that_is_only_moved_is_held_against_skopeo():
    results = Results()
    results.add(Side.OURS, Step.COPY, Measured(2.0, 1.0, 10**7))
    results.add(Side.SKOPEO, Step.COPY, Measured(3.0, 1.0, 10**7))

    table = copies_table(results)

    assert "| pull without unpacking, nothing cached | 2.00 | 3.00 | 1.5 |" in table
    assert "| push to a registry on loopback that has the base | n/a | n/a | n/a |" in table


def test_the_limit_is_held_against_our_build():
    limits = Limits(10**6, 3 * 10**6, 5, 2, (Line("hashing", 2.0, 4.0),), (Rate("zlib", 250.0, 200.0),))

    table = limits.table(3.0, 5.0)

    assert "| our build | 3.00 | 5.00 | | |" in table
    assert "| hashing | 2.00 | 4.00 | 1.50 | 1.25 |" in table
    assert "| zlib | 250 | 200 |" in table


def test_a_command_that_fails_is_shown_with_what_it_said(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        runner = Runner(tmp_path, log)
        assert runner.run(["sh", "-c", "echo out"]).stdout == "out\n"
        with pytest.raises(CommandFailedError, match=r"exit code 3:(.|\n)*no such luck"):
            runner.run(["sh", "-c", "echo no such luck >&2; exit 3"])
