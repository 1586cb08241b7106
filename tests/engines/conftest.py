"""Level 5: real engines, few of them for the whole run."""

import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.engines.real import RealService, Services, Up, manifest, require_engines, up_already
from tests.engines.short import SHORT


@pytest.fixture
def rng(request: pytest.FixtureRequest, seed: int) -> random.Random:
    """Of the run's seed and of the test: no other test has asked these engines the same."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """What is brought up with them leaves nothing in shared memory."""
    require_engines()
    before = shared_memory()
    made = Services(tmp_path_factory.mktemp("services"))
    try:
        yield made
    finally:
        made.end()
    assert shared_memory() - before == set()


def shared_memory() -> set[str]:
    """LMCache's pools on this machine."""
    return {name for name in os.listdir("/dev/shm") if "lmcache" in name}


@pytest.fixture(scope="session")
def pair_up(services: Services) -> Up:
    """Two engines with NIXL, up for the whole run.

    ENGINE_TESTS_SERVICE names the folder (XDG_RUNTIME_DIR) of such a service that is up and stays up, for
    work on a test.
    """
    if folder := os.environ.get("ENGINE_TESTS_SERVICE"):
        return up_already(Path(folder))
    return services.up("pair", manifest())


@pytest.fixture(scope="session")
def short_up(services: Services) -> Up:
    """Two engines, configured by hand as `SHORT` says: another lease, another block size, little memory."""
    return services.up("short", manifest(**SHORT))


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
