from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from envbuilder.cli.main import main
from envbuilder.cli.push import push_built
from envbuilder.images.cachedbuild import Built
from envbuilder.images.cacheentry import Question, layer_entry
from envbuilder.images.remotecache import Hit
from envbuilder.registry.client import open_repository
from envbuilder.registry.reference import Reference
from envbuilder.store.store import Store
from tests.images.transfer import image, layer, push_to
from tests.registries import fake_registry, private_configuration, quick_retries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.registries import FakeRegistry


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Give the user's store, in a folder of the test's own."""
    private_configuration(monkeypatch, tmp_path / "configuration")
    quick_retries(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path / "cache" / "envbuilder" / "store")


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as registry:
        yield registry


def test_there_and_back(registry: FakeRegistry, store: Store, capsys: pytest.CaptureFixture[str]):
    made = image(store, "base-v4", ["a", "b"])

    assert main(["push", "base-v4", f"{registry.address}/ml/base:v4"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{registry.address}/ml/base@{made.digest}\n"
    assert "pushed: 243 kB sent" in captured.err
    store.drop_image("base-v4")
    assert main(["pull", f"{registry.address}/ml/base:v4", "--as", "mine"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{registry.address}/ml/base@{made.digest}\n"
    assert "pulled as `mine`: 243 kB there already" in captured.err
    assert store.images() == {"mine": made.digest}


def test_as_json(registry: FakeRegistry, store: Store, capsys: pytest.CaptureFixture[str]):
    made = image(store, "base-v4", ["a"])
    total = made.manifest.config.size + made.manifest.layers[0].size
    reference = f"{registry.address}/ml/base@{made.digest}"

    assert main(["push", "base-v4", f"{registry.address}/ml/base", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "schema": 1, "reference": reference, "digest": str(made.digest),
        "bytes": {"sent": total, "mounted": 0, "present": 0},
    }  # fmt: skip
    assert main(["pull", f"{registry.address}/ml/base", "--json", "--no-unpack"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "schema": 1, "name": "base", "reference": reference, "digest": str(made.digest), "stated": str(made.digest),
        "bytes": {"received": 0, "present": total},
    }  # fmt: skip
    assert not (store.root / "trees").exists()


@pytest.mark.parametrize("here", [True, False])
def test_what_was_built_is_pushed_also_when_only_a_cache_has_its_layers(
    registry: FakeRegistry,
    store: Store,
    tmp_path: Path,
    here: bool,  # noqa: FBT001
):
    maker = Store(tmp_path / "maker")
    made = image(store if here else maker, "small", ["a", "b"])
    hits: tuple[Hit, ...] = ()
    if not here:
        cache = open_repository(push_to(registry, "team/cache", made, maker))
        questions = [Question("layer", name, name) for name in ("a", "b")]
        hits = tuple(Hit(q, layer_entry(q, layer(maker, q.title)), cache) for q in questions)
    built = Built(None, None, made, hits)  # type: ignore[arg-type]  # neither is looked at

    pushed = push_built(built, store, Reference.parse(registry.reference("team/small")))

    assert str(pushed) == f"{registry.address}/team/small@{made.digest}"
    assert registry.tags["team/small"] == {"v1": str(made.digest)}
    assert not [found for found in made.manifest.layers if store.has(found.digest)] or here


def test_where_to_push_is_looked_at_before_anything_is_built(capsys: pytest.CaptureFixture[str]):
    assert main(["build", "no-such", "--push", "https://host/x"]) == 2
    assert "leave off `https://`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["push", "base-v4", "localhost/x"], "build it: `envbuilder build base-v4`"),
        (["push", "ai-v4+flash-attn", "localhost/x"], "build it: `envbuilder build ai-v4 --extra flash-attn`"),
        (["push", "mien", "localhost/x"], "did you mean `mine`?"),
        (["push", "mine", "https://host/x"], "leave off `https://`"),
        (["pull", "host.test/UPPER"], "write `upper`"),
    ],
)
def test_wrong_input(store: Store, capsys: pytest.CaptureFixture[str], argv: list[str], hint: str):
    image(store, "mine", ["a"])
    assert main(argv) == 2
    assert f"hint: {hint}\n" in capsys.readouterr().err


def test_a_registry_that_is_away(store: Store, capsys: pytest.CaptureFixture[str]):
    image(store, "mine", ["a"])
    assert main(["push", "mine", "127.0.0.1:1/x"]) == 3
    assert main(["pull", "127.0.0.1:1/x"]) == 3
    assert "the connection was refused" in capsys.readouterr().err
