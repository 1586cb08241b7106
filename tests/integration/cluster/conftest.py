"""The store adapters that the contract is tested on. A new adapter is one more parameter of `store`."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from fulcrum_cluster.client import open_store
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.store_server import serve_store
from fulcrum_core.api import ObjectMeta, QoSTier
from fulcrum_core.ports import Store

HISTORY = 64


@pytest.fixture(params=["memory", "socket"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    memory = MemoryStore(SystemClock(), history=HISTORY, bookmark_interval_s=0.05)
    if request.param == "memory":
        yield memory
        return
    path = tmp_path / "s.sock"
    async with serve_store(memory, path), open_store(f"unix:{path}") as client:
        yield client


@pytest.fixture
def namespace() -> str:
    return f"conformance-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def forget_history(store: Store) -> Callable[[], Awaitable[None]]:
    """Function that makes the store drop its history, so that no watch can resume from an earlier version."""

    async def forget() -> None:
        name, namespace = f"churn-{uuid.uuid4().hex[:8]}", "churn"
        await store.create(QoSTier(metadata=ObjectMeta(name=name, namespace=namespace)))
        for priority in range(1, HISTORY + 2):
            await store.patch(QoSTier, name, {"spec": {"priority": priority}}, namespace=namespace)

    return forget
