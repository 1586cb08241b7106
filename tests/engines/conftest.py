"""Level 5: real engines, few of them for the whole run."""

import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.engines.in_process_router import ExtraEngine, start_extra_engine
from tests.engines.older_vllm import OLDER_VLLM_PROGRAM
from tests.engines.services import (
    LocalServices,
    RunningService,
    VllmService,
    build_manifest,
    find_running_service,
    require_engines,
)
from tests.engines.short_lease import SHORT_LEASE_SPEC


@pytest.fixture
def rng(request: pytest.FixtureRequest, seed: int) -> random.Random:
    """Of the run's seed and of the test: no other test has asked these engines the same."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """What is brought up with them leaves nothing in shared memory."""
    require_engines()
    before = shared_memory()
    made = LocalServices(tmp_path_factory.mktemp("services"))
    try:
        yield made
    finally:
        made.stop_all()
    assert shared_memory() - before == set()


def shared_memory() -> set[str]:
    """LMCache's pools on this machine."""
    return {name for name in os.listdir("/dev/shm") if "lmcache" in name}


@pytest.fixture(scope="session")
def pair_service(services: LocalServices) -> RunningService:
    """Two engines with NIXL, up for the whole run.

    ENGINE_TESTS_SERVICE names the folder (XDG_RUNTIME_DIR) of such a service that is up and stays up, for
    work on a test.
    """
    if folder := os.environ.get("ENGINE_TESTS_SERVICE"):
        return find_running_service(Path(folder))
    return services.start("pair", build_manifest())


@pytest.fixture(scope="session")
def short_lease_service(services: LocalServices) -> RunningService:
    """Two engines, configured by hand as `SHORT_LEASE_SPEC` says: another lease, another block size, little
    memory."""
    return services.start("short_lease", build_manifest(**SHORT_LEASE_SPEC))


@pytest.fixture(scope="session")
def older_engine_starting(pair_service: RunningService) -> Iterator[ExtraEngine]:
    """One like the pair's, but older, on its way up."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # for sockets, by a short name
        program = Path(folder, "older.py")
        program.write_text(OLDER_VLLM_PROGRAM, encoding="utf-8")
        with start_extra_engine(pair_service, Path(folder), program) as engine:
            yield engine


@pytest.fixture(scope="session")
def start_older_engine_early(request: pytest.FixtureRequest) -> None:
    """What later tests need comes up beside what this one needs: an engine on its way takes half a minute,
    and one of two processors.
    """
    if any("older_engine_starting" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("older_engine_starting")


@pytest.fixture
async def short_lease(short_lease_service: RunningService) -> AsyncIterator[VllmService]:
    """Those, at rest before each test."""
    async with short_lease_service.connect() as service:
        yield service


@pytest.fixture
async def pair(pair_service: RunningService) -> AsyncIterator[VllmService]:
    """The pair, at rest before each test."""
    async with pair_service.connect() as service:
        yield service
