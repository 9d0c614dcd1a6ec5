"""What the tests of this room share: no configuration but the test's own, and a client that does not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.registries import fake_registry, private_configuration, quick_retries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.registries import FakeRegistry


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder that has the client's whole configuration; chunks of 1000 bytes, above 1500."""
    quick_retries(monkeypatch, monolithic=1500, chunk=1000)
    return private_configuration(monkeypatch, tmp_path / "configuration")


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as registry:
        yield registry
