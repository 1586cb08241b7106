"""Fixtures of level 5: services with real vLLM engines, started once for the whole run."""

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
    """Random numbers from the run's seed and the test's name, so no other test has sent the same prompts."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """Start services; fail if they leave anything in shared memory."""
    require_engines()
    before = shared_memory()
    made = LocalServices(tmp_path_factory.mktemp("services"))
    try:
        yield made
    finally:
        made.stop_all()
    assert shared_memory() - before == set()


def shared_memory() -> set[str]:
    """Return the names of LMCache's pools in this machine's shared memory."""
    return {name for name in os.listdir("/dev/shm") if "lmcache" in name}


@pytest.fixture(scope="session")
def pair_service(services: LocalServices) -> RunningService:
    """Two engines with NIXL, running for the whole run.

    To work on a test, name the folder (XDG_RUNTIME_DIR) of a running service in ENGINE_TESTS_SERVICE: it is
    used and stays up.
    """
    if folder := os.environ.get("ENGINE_TESTS_SERVICE"):
        return find_running_service(Path(folder))
    return services.start("pair", build_manifest())


@pytest.fixture(scope="session")
def short_lease_service(services: LocalServices) -> RunningService:
    """Two engines with the arguments of `SHORT_LEASE_SPEC`: short lease, smaller blocks, little memory."""
    return services.start("short_lease", build_manifest(**SHORT_LEASE_SPEC))


@pytest.fixture(scope="session")
def older_engine_starting(pair_service: RunningService) -> Iterator[ExtraEngine]:
    """An engine like those of the pair that reports an older version; it may still be starting."""
    # Not below tmp_path: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        program = Path(folder, "older.py")
        program.write_text(OLDER_VLLM_PROGRAM, encoding="utf-8")
        with start_extra_engine(pair_service, Path(folder), program) as engine:
            yield engine


@pytest.fixture(scope="session")
def start_older_engine_early(request: pytest.FixtureRequest) -> None:
    """Start the older engine now, while this fixture's engines load: each takes 30 s and one of two cores."""
    if any("older_engine_starting" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("older_engine_starting")


@pytest.fixture
async def short_lease(short_lease_service: RunningService) -> AsyncIterator[VllmService]:
    """The short-lease service; idle before each test."""
    async with short_lease_service.connect() as service:
        yield service


@pytest.fixture
async def pair(pair_service: RunningService) -> AsyncIterator[VllmService]:
    """The pair; idle before each test."""
    async with pair_service.connect() as service:
        yield service
