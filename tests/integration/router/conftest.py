"""Fixtures of the router's integration tests: an HTTP client for each test."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.integration.router.fake_engines import DEADLINE_S


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that opens a connection per request, so that tests do not affect each other."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(DEADLINE_S)
    ) as session:
        yield session
