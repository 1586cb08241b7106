"""Engine servers with a quick profile: a pair shared by a module, or new ones for a single test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from fulcrum_core.profiles import load_profile
from tests.integration.simulator.servers import BLOCK_TOKENS, BLOCKS, Client, Server, Start, launch, ready


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile with short steps and so few blocks that they are reused soon."""
    profile = load_profile("laptop").model_dump() | {
        "name": "quick",
        "t0": 0.002,
        "d1": 1e-5,
        "b": 1.25e-4,
        "weight_bytes": 100_000_000,
        "block_size": BLOCK_TOKENS,
        "kv_capacity_tokens": BLOCK_TOKENS * BLOCKS,
        "handshake_s": 0.01,
        "startup_s": 0.0,
    }
    path = tmp_path_factory.mktemp("profile") / "quick.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


@pytest.fixture
def start(profile_file: Path) -> Iterator[Start]:
    """Start servers; they are killed after the test."""
    servers: list[Server] = []

    def start_one(*arguments: str) -> Server:
        servers.append(ready(launch(profile_file, *arguments)))
        return servers[-1]

    yield start_one
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def pair(profile_file: Path) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode instance, shared by the tests of a module, which leave them idle and without
    faults.
    """
    processes = [launch(profile_file), launch(profile_file)]
    servers = [ready(process) for process in processes]
    yield servers[0], servers[1]
    for server in servers:
        server.kill()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """An HTTP client that opens a connection for each request."""
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        yield Client(session)
