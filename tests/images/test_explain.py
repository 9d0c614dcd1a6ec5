from __future__ import annotations

from envbuilder.images.explain import explain
from envbuilder.images.layering import plan
from tests.images.test_layering import AI, BASE, BIG, LAYERING, SMALL, lock, package


def test_each_row_says_what_it_holds_and_who_shares_it():
    rows = explain(plan(AI, BASE, LAYERING), {"base": plan(BASE, None, LAYERING)})
    assert [row.environment for row in rows if row.shared] == ["base"] * 7
    assert {row.shared for row in rows if row.environment == "base"} == {("base",)}
    assert {row.shared for row in rows if row.environment == "ai"} == {()}
    assert rows[0].packages == ("torch 1",)
    assert rows[0].size == 800 << 20
    assert sum(row.size for row in rows) == sum(p.size for p in AI.packages)


def test_a_bucket_with_another_version_is_not_shared():
    other = lock("other", *BIG, *[package(p.name, p.size, "2") if p.name == "small-7" else p for p in SMALL])
    rows = explain(plan(BASE, None, LAYERING), {"other": plan(other, None, LAYERING)})
    assert [row.title.split(":")[0] for row in rows if not row.shared] == [
        next(row.title.split(":")[0] for row in rows if "small-7 1" in row.packages)
    ]
