"""Of several local runs, a command finds the run that has an instance by reading the runs' stores."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fulcrum_cli.local.run_folder import RunInfo
from fulcrum_cli.target.connection import find_run_of_instance
from fulcrum_cli.target.selection import LocalTarget
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.store_server import serve_store
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.errors import InvalidInput
from tests.objects import make_object


def instance(name: str, service: str) -> PDInstance:
    spec = {"service": service, "pool": "flex", "model": "m", "engine": {"type": "Simulated"}}
    return make_object(PDInstance, name, spec)


def run_info(service: str, socket: Path) -> RunInfo:
    return RunInfo(
        pid=1, started_at_s=0.0, service=service, namespace="default", run_dir=str(socket.parent),
        store_address=f"unix:{socket}", token_file="/t", router_url="http://r",
        router_state_url="http://s", autoscaler_url="http://a", router_metrics_url="http://m",
    )  # fmt: skip


@pytest.fixture
async def local_runs() -> AsyncIterator[LocalTarget]:
    """Yield the local runs of two services, with an instance each whose name does not show its service."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fulcrum-")))
        runs = []
        for service, name in (("chat", "left"), ("code", "right")):
            store = MemoryStore(SystemClock())
            await store.create(instance(name, service))
            await stack.enter_async_context(serve_store(store, folder / service))
            runs.append(run_info(service, folder / service))
        yield LocalTarget(tuple(runs))


async def test_the_local_run_that_has_the_instance_is_found(local_runs: LocalTarget) -> None:
    found = [(await find_run_of_instance(local_runs, name)).service for name in ("left", "right")]
    assert found == ["chat", "code"]


async def test_an_instance_in_no_local_run_is_refused_with_the_running_services(
    local_runs: LocalTarget,
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await find_run_of_instance(local_runs, "chat-9")
    assert str(caught.value) == "instance (chat-9) is in no local run; running: chat, code"
