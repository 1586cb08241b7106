"""Level 5: real engines, few of them for the whole run."""

import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.engines.older import PROGRAM
from tests.engines.own_router import Twin, twin
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


@pytest.fixture(scope="session")
def older_begun(pair_up: Up) -> Iterator[Twin]:
    """One like the pair's, but older, on its way up."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # for sockets, by a short name
        program = Path(folder, "older.py")
        program.write_text(PROGRAM, encoding="utf-8")
        with twin(pair_up, Path(folder), program) as begun:
            yield begun


@pytest.fixture(scope="session")
def beside(request: pytest.FixtureRequest) -> None:
    """What later tests need comes up beside what this one needs: an engine on its way takes half a minute,
    and one of two processors.
    """
    if any("older_begun" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("older_begun")


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
