"""Level 5: real engines, one pair of them for the whole run."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conftest import Figure as Figure
from tests.engines.real import RealService, Up, manifest, require_engines, up, up_already
from tests.engines.short import SHORT


@pytest.fixture(scope="session")
def pair_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two engines with NIXL, up for the whole run.

    ENGINE_TESTS_SERVICE names the folder (XDG_RUNTIME_DIR) of such a service that is up and stays up, for
    work on a test.
    """
    require_engines()
    if folder := os.environ.get("ENGINE_TESTS_SERVICE"):
        yield up_already(Path(folder))
        return
    with up(tmp_path_factory.mktemp("engines"), manifest()) as made:
        yield made


@pytest.fixture(scope="session")
def short_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two engines, configured by hand as `SHORT` says: another lease, another block size, little memory."""
    require_engines()
    with up(tmp_path_factory.mktemp("short"), manifest(**SHORT)) as made:
        yield made


@pytest.fixture
async def short(short_up: Up) -> AsyncIterator[RealService]:
    """Those, at rest before each test."""
    async with short_up.opened() as service:
        yield service


@pytest.fixture
async def pair(pair_up: Up) -> AsyncIterator[RealService]:
    """The pair, at rest before each test."""
    async with pair_up.opened() as service:
        yield service
