"""A local run with simulated engines, router and autoscaler serves, flips, scales and verifies transfers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from fulcrum_cli.assignment.writes import flip_instance
from fulcrum_cli.local.run import LocalRun, LocalRunOptions, run_local
from fulcrum_cluster.router_client import HttpRouterClient, open_http_client
from fulcrum_core.api import PDInstance, PDPool, PDService
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Role
from tests.objects import make_object

DEADLINE_S = 30.0
SPEC = {
    "model": "m",
    "pools": [{"name": "flex", "instances": {"min": 2, "max": 3}}],
    "autoscaling": {"mode": "Off"},
}


@pytest.fixture
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalRun]:
    """A service of two serving instances that can be scaled to three."""
    options = LocalRunOptions(port=0, run_dir=tmp_path_factory.mktemp("r"))
    async with run_local([make_object(PDService, "chat", SPEC)], options) as local_run:
        async with asyncio.timeout(DEADLINE_S):
            await local_run.wait_serving()
        yield local_run


async def wait_until(run: LocalRun, condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await run.wait_change()


async def instance_names(run: LocalRun) -> list[str]:
    return [i.metadata.name for i in (await run.store.list(PDInstance, namespace="default")).items]


async def read_state(run: LocalRun) -> RouterState:
    async with open_http_client(run.info.router_state_url, token=run.info.token) as client:
        return await HttpRouterClient(client).get_state(response_margin_s=DEADLINE_S)


async def test_a_request_is_served_by_a_prefill_and_a_decode_instance(run: LocalRun) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
        response = await client.post(
            f"{run.info.router_url}/v1/completions",
            json={"model": "m", "prompt": "a prompt of some length " * 20, "max_tokens": 3},
        )
    assert (
        response.status_code,
        response.headers.get("x-fulcrum-prefill"),
        response.headers.get("x-fulcrum-decode"),
    ) == (
        200,
        "chat-0",
        "chat-1",
    )


async def test_a_flip_changes_the_role_in_the_router_and_in_the_instances_status(run: LocalRun) -> None:
    await scale(run, 3)
    await wait_until(run, lambda: is_ready(run, "3/3"))
    written = await flip_instance(
        run.store, "chat", "chat-2", Role.PREFILL, namespace="default", reason="requested"
    )

    async def role_changed() -> bool:
        instance = await run.store.get(PDInstance, "chat-2", namespace="default")
        return instance.status.role is Role.PREFILL

    await wait_until(run, role_changed)
    router = await read_state(run)
    assert router.generation >= written.generation
    assert {i.name: i.role for i in router.instances}["chat-2"] is Role.PREFILL


async def test_scaling_up_adds_a_serving_instance_and_scaling_down_removes_it(run: LocalRun) -> None:
    await scale(run, 3)
    await wait_until(run, lambda: is_ready(run, "3/3"))
    await scale(run, 2)

    async def scaled_down() -> bool:
        return await instance_names(run) == ["chat-0", "chat-1"]

    await wait_until(run, scaled_down)
    assert sorted(run.pids()) == ["autoscaler", "chat-0", "chat-1", "router"]


async def test_canaries_verify_the_kv_transfer_of_an_idle_service(run: LocalRun) -> None:
    both = "KV transfer verified: chat-0 → chat-1, chat-1 → chat-0"

    async def verified() -> bool:
        service = await run.store.get(PDService, "chat", namespace="default")
        found = {c.type: (c.status, c.reason, c.message) for c in service.status.conditions}
        return found.get("KVTransferVerified") == ("True", "Verified", both)

    await wait_until(run, verified)
    listing = await run.store.list(PDInstance, namespace="default")
    assert [i.status.kv_verified_at is not None for i in listing.items] == [True, True]


async def scale(run: LocalRun, replicas: int) -> None:
    await run.store.patch(PDPool, "chat-flex", {"spec": {"replicas": replicas}}, namespace="default")


async def is_ready(run: LocalRun, count: str) -> bool:
    service = await run.store.get(PDService, "chat", namespace="default")
    return service.status.ready == count
