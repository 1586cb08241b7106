"""In a local run without requests, canaries verify the KV transfer of each pair."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from fulcrum_cli.local.run import LocalRun, LocalRunOptions, run_local
from fulcrum_core.api import PDInstance, PDService
from tests.objects import make_object

DEADLINE_S = 60.0
SPEC = {"model": "m", "instances": 2, "autoscaling": {"mode": "Off"}}


@pytest.fixture
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalRun]:
    """A service of two serving instances."""
    options = LocalRunOptions(port=0, run_dir=tmp_path_factory.mktemp("r"))
    async with run_local([make_object(PDService, "chat", SPEC)], options) as local_run:
        async with asyncio.timeout(DEADLINE_S):
            await local_run.wait_serving()
        yield local_run


async def verdict(run: LocalRun) -> tuple[str, str, str]:
    service = await run.store.get(PDService, "chat", namespace="default")
    found = {c.type: (c.status, c.reason, c.message) for c in service.status.conditions}
    return found.get("KVTransferVerified", ("", "", ""))


async def test_canaries_verify_the_kv_transfer_of_an_idle_service(run: LocalRun) -> None:
    both = "KV transfer verified: chat-0 → chat-1, chat-1 → chat-0"
    async with asyncio.timeout(DEADLINE_S):
        while await verdict(run) != ("True", "Verified", both):
            await run.wait_change()
    listing = await run.store.list(PDInstance, namespace="default")
    assert {i.metadata.name: i.status.kv_verified_at is not None for i in listing.items} == {
        "chat-0": True,
        "chat-1": True,
    }
