from __future__ import annotations

import random
from dataclasses import replace

import pytest

from envbuilder.images.layering import LayerBudgetError, bucket_of, plan
from envbuilder.lock.model import Lock, LockInput, Package, Target
from envbuilder.oci.digest import Digest
from envbuilder.spec.recipe import Layering

LAYERING = Layering(alone=8 << 20, buckets=4, budget=60)
INPUT = LockInput(None, "2025-12-01T00:00:00Z", (), (), (), ())


def package(name: str, size: int, version: str = "1") -> Package:
    return Package(
        name, version, f"{name}-{version}-py3-none-any.whl", Digest.of(f"{name}{version}".encode()), size, ()
    )


def lock(name: str, *packages: Package) -> Lock:
    ordered = tuple(sorted(packages, key=lambda p: p.name))
    return Lock(name, INPUT, Target("3.12", "x86_64", "2.35"), "12.6", ordered)


SMALL = [package(f"small-{n}", 1000 + n) for n in range(40)]
BIG = [package("torch", 800 << 20), package("cudnn", 600 << 20), package("cublas", 600 << 20)]
BASE = lock("base", *SMALL, *BIG)
AI = lock("ai", *SMALL, *BIG, *[package(f"more-{n}", 2000) for n in range(20)], package("ray", 70 << 20))


def test_big_ones_lie_alone_heaviest_first_then_the_buckets():
    (stage,) = plan(BASE, None, LAYERING)
    assert [g.packages[0].name for g in stage.groups[:3]] == ["torch", "cublas", "cudnn"]
    assert len(stage.groups) == 3 + 4
    assert sorted(p.name for g in stage.groups for p in g.packages) == sorted(p.name for p in BASE.packages)


def test_the_order_of_packages_does_not_matter():
    shuffled = list(BASE.packages)
    random.Random(1).shuffle(shuffled)  # noqa: S311
    assert (
        plan(replace(BASE, packages=tuple(shuffled)), None, LAYERING)[0].groups == plan(BASE, None, LAYERING)[0].groups
    )


def test_what_extends_begins_with_what_it_extends():
    base, stages = plan(BASE, None, LAYERING), plan(AI, BASE, LAYERING)
    assert stages[0] == base[0]
    assert [stage.lock.environment for stage in stages] == ["base", "ai"]
    assert {p.name for g in stages[1].groups for p in g.packages} == {p.name for p in AI.packages} - {
        p.name for p in BASE.packages
    }


def test_one_update_touches_one_bucket():
    before = plan(BASE, None, LAYERING)[0].groups
    bumped = lock("base", *(package(p.name, p.size, "2") if p.name == "small-7" else p for p in BASE.packages))
    after = plan(bumped, None, LAYERING)[0].groups
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(changed) == 1
    assert f"bucket {bucket_of('small-7', 4)}:" in changed[0][0].title


def test_an_over_full_plan_explains_itself():
    full = lock("full", *(package(f"big-{n:02}", (10 + n) << 20) for n in range(70)))
    with pytest.raises(LayerBudgetError, match="74 layers, 14 more than the budget of 60") as caught:
        plan(full, None, LAYERING)
    assert caught.value.hint is not None
    assert "`layering.alone-mib` to 28" in caught.value.hint
    assert plan(full, None, replace(LAYERING, alone=28 << 20))
    with pytest.raises(LayerBudgetError):
        plan(full, None, replace(LAYERING, alone=27 << 20))
