"""A run with every real part: engine servers, router, autoscaler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from fulcrum_cli.local import LocalOptions, LocalRun, run_local
from fulcrum_core.api import PDAssignment, PDInstance, PDPool, PDService, parse_object
from fulcrum_core.assignment import with_flip
from fulcrum_core.merge import merge_diff
from fulcrum_core.state import RouterState
from fulcrum_core.values import Actor, Role

DEADLINE_S = 30.0
SERVICE = {
    "apiVersion": "fulcrum.dev/v1alpha1",
    "kind": "PDService",
    "metadata": {"name": "chat"},
    "spec": {
        "model": "m",
        "pools": [{"name": "flex", "instances": {"min": 2, "max": 3}}],
        "autoscaling": {"mode": "Off"},
    },
}


@pytest.fixture
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalRun]:
    """A service of two instances, up to three, of which all serve."""
    options = LocalOptions(port=0, run_dir=tmp_path_factory.mktemp("r"))
    async with run_local([parse_object(SERVICE)], options) as made:
        async with asyncio.timeout(DEADLINE_S):
            await made.serving()
        yield made


async def until(run: LocalRun, holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():
            await run.changed()


async def names(run: LocalRun) -> list[str]:
    return [i.metadata.name for i in (await run.store.list(PDInstance, namespace="default")).items]


async def state(run: LocalRun) -> RouterState:
    headers = {"authorization": f"Bearer {run.info.token}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=DEADLINE_S) as client:
        answer = await client.get(f"{run.info.router_state_url}/state")
    return RouterState.model_validate_json(answer.raise_for_status().content)


async def test_a_request_is_answered_by_prefill_and_decode(run: LocalRun) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
        answer = await client.post(
            f"{run.info.router_url}/v1/completions",
            json={"model": "m", "prompt": "a prompt of some length " * 20, "max_tokens": 3},
        )
    assert (
        answer.status_code,
        answer.headers.get("x-fulcrum-prefill"),
        answer.headers.get("x-fulcrum-decode"),
    ) == (
        200,
        "chat-0",
        "chat-1",
    )


async def test_a_flip_shows_in_the_router_and_in_the_instance(run: LocalRun) -> None:
    await scale(run, 3)
    await until(run, lambda: ready(run, "3/3"))
    now = await run.store.get(PDAssignment, "chat", namespace="default")
    spec = with_flip(now.spec, "chat-2", Role.PREFILL, by=Actor.PERSON, reason="asked", now_s=0.0)
    written = await run.store.patch(
        PDAssignment, "chat", {"spec": merge_diff(now.spec.dump(), spec.dump())}, namespace="default"
    )

    async def shown() -> bool:
        instance = await run.store.get(PDInstance, "chat-2", namespace="default")
        return instance.status.role is Role.PREFILL

    await until(run, shown)
    told = await state(run)
    assert told.generation >= written.metadata.generation
    assert {i.name: i.role for i in told.instances}["chat-2"] is Role.PREFILL


async def test_scaling_up_serves_and_scaling_down_drains_through_the_router(run: LocalRun) -> None:
    await scale(run, 3)
    await until(run, lambda: ready(run, "3/3"))
    await scale(run, 2)

    async def gone() -> bool:
        return await names(run) == ["chat-0", "chat-1"]

    await until(run, gone)
    assert sorted(run.pids()) == ["autoscaler", "chat-0", "chat-1", "router"]


async def scale(run: LocalRun, replicas: int) -> None:
    await run.store.patch(PDPool, "chat-flex", {"spec": {"replicas": replicas}}, namespace="default")


async def ready(run: LocalRun, count: str) -> bool:
    service = await run.store.get(PDService, "chat", namespace="default")
    return service.status.ready == count
