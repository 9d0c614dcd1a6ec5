"""Fixtures that the tests of several rooms share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import engines

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """Give the address of a Docker engine, started for this run when none answers; DOCKER_HOST leads to it."""
    with engines.engine() as address:
        yield address
