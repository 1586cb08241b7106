"""Watches whose connections fall silent are noticed within half a minute, and the connections are closed."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from fulcrum_cluster.client import open_store, resolve_client_config
from fulcrum_cluster.informer import Informer
from fulcrum_core.api import PDService
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.kopf_feed import KopfFeed
from tests.kubernetes.control_plane.operator_process import NamespaceClient
from tests.kubernetes.control_plane.silent_relay import SilentRelay, silent_relay
from tests.waiting import wait_until
from tools.kubernetes.cluster import Cluster

NOTICED_WITHIN_S = 30.0

Steps = Callable[[Callable[[], set[str]]], Awaitable[None]]
"""The steps of the test; their argument returns the names of the services seen so far."""
Follower = Callable[[str, str, Steps], Awaitable[None]]
"""Follows the services of a namespace through an API server until the steps are done."""


@pytest.fixture
def relay(control_plane: Cluster) -> Iterator[SilentRelay]:
    port = re.search(r"https://127.0.0.1:(\d+)", Path(control_plane.kubeconfig).read_text())
    assert port is not None
    with silent_relay(("127.0.0.1", int(port[1]))) as relay:
        yield relay


@pytest.fixture
def address(control_plane: Cluster, relay: SilentRelay, tmp_path: Path) -> str:
    """The API server through the relay, as a `--store` address."""
    config = tmp_path / "kubeconfig"
    text = Path(control_plane.kubeconfig).read_text()
    config.write_text(re.sub(r"https://127.0.0.1:\d+", f"https://127.0.0.1:{relay.port}", text))
    return f"kubeconfig:{config}"


async def follow_with_operator(address: str, namespace: str, steps: Steps) -> None:
    """Follow the services of a namespace as the operator does."""
    cache, stop = ObjectCache(lambda _key: None), asyncio.Event()
    feed = KopfFeed(resolve_client_config(address), cache, namespace=namespace)
    running = asyncio.get_running_loop().create_task(
        feed.run(stop, on_started=lambda: None, on_object_listed=lambda: None)
    )
    try:
        await steps(lambda: {key.name for key in cache.list_services()})
    finally:
        stop.set()
        await running


async def follow_with_informer(address: str, namespace: str, steps: Steps) -> None:
    """Follow the services of a namespace as routers and the autoscaler do."""
    async with open_store(address) as store:
        informer = Informer(store, PDService, namespace=namespace)
        running = asyncio.get_running_loop().create_task(informer.run())
        try:
            await steps(lambda: set(informer.objects))
        finally:
            running.cancel()
            await asyncio.wait([running])


@pytest.mark.parametrize("follow", [follow_with_operator, follow_with_informer])
async def test_a_silent_watch_is_noticed_within_half_a_minute(
    control_plane: Cluster, namespace: str, relay: SilentRelay, address: str, follow: Follower
) -> None:
    api = NamespaceClient(control_plane, namespace)

    async def change(known: Callable[[], set[str]]) -> None:
        await asyncio.to_thread(api.service, "before")
        await wait_until(lambda: known() == {"before"}, timeout_s=10)
        assert relay.fall_silent() > 0
        await asyncio.to_thread(api.service, "after")
        try:
            await wait_until(lambda: known() == {"before", "after"}, timeout_s=NOTICED_WITHIN_S)
        finally:
            relay.hang_up()

    await follow(address, namespace, change)
    await wait_until(lambda: relay.connections == 0, "the clients to close their connections")
