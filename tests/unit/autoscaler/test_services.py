"""One loop per service: begun and ended as services come and go, each with its own router and journal."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from fulcrum_autoscaler.journal import Journals
from fulcrum_autoscaler.meters import Families
from fulcrum_autoscaler.options import IN_CLUSTER_STATE, Options, parse_options
from fulcrum_autoscaler.routers import FileToken, HttpRouter, RouterAway
from fulcrum_autoscaler.services import Services
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory import MemoryStore
from fulcrum_core.api.manifest import parse_as
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.state import FlipWanted, RouterState

DEADLINE_S = 20.0
Key = tuple[str, str]


class NoRouter:
    """A router that is away, and remembers that it was asked."""

    def __init__(self, asked: set[Key], key: Key, *, fault: bool) -> None:
        self._asked, self._key, self._fault = asked, key, fault

    async def state(self, *, min_generation: int, timeout_s: float) -> RouterState:  # noqa: ARG002
        self._asked.add(self._key)
        if self._fault:
            raise ValueError("a fault of ours")
        raise RouterAway("away")

    async def flip_wanted(self, *, after: int, timeout_s: float) -> FlipWanted | None:  # noqa: ARG002
        raise RouterAway("away")


class World:
    def __init__(self, namespace: str = "", only: str | None = None, faulty: str = "") -> None:
        self.store = MemoryStore(SystemClock())
        self.journals, self.families = Journals(), Families()
        self.asked: set[Key] = set()
        self.services = Services(
            self.store,
            namespace=namespace,
            only=only,
            router_of=lambda *key: NoRouter(self.asked, key, fault=key[1] == faulty),
            clock=SystemClock(),
            journals=self.journals,
            families=self.families,
        )

    async def create(self, namespace: str, name: str) -> None:
        manifest = {
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"model": "m", "instances": 2},
        }
        await self.store.create(parse_as(PDService, manifest))

    def deciding(self) -> set[Key]:
        """Services on which something was decided."""
        return {(told["namespace"], told["service"]) for told in self.journals.recent(1000)}

    def counted(self) -> set[Key]:
        """Services of which there are series."""
        series = [s.labels for family in self.families.registry.collect() for s in family.samples]
        return {(labels["namespace"], labels["service"]) for labels in series if "service" in labels}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def start() -> AsyncIterator[Callable[[World], None]]:
    running: list[asyncio.Task[None]] = []
    yield lambda world: running.append(asyncio.ensure_future(world.services.run()))
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_every_service_of_every_namespace_has_its_loop_for_as_long_as_it_is_there(
    start: Callable[[World], None],
) -> None:
    world = World()
    await world.create("prod", "chat")
    start(world)
    await until(lambda: world.deciding() == {("prod", "chat")})
    assert world.services.ready
    await world.create("test", "chat")
    await world.create("prod", "code")
    every = {("prod", "chat"), ("prod", "code"), ("test", "chat")}
    await until(lambda: (world.deciding(), world.asked) == (every, every))
    await world.store.delete(PDService, "chat", namespace="prod")
    rest = every - {("prod", "chat")}
    await until(lambda: (world.deciding(), world.counted()) == (rest, rest))
    await world.create("prod", "chat")
    await until(lambda: world.deciding() == every)


async def test_a_service_that_is_made_anew_at_once_keeps_its_loop(start: Callable[[World], None]) -> None:
    world = World()
    await world.create("prod", "chat")
    start(world)
    await until(lambda: bool(world.deciding()))
    await world.store.delete(PDService, "chat", namespace="prod")
    await world.create("prod", "chat")
    world.asked.clear()
    await until(lambda: bool(world.asked and world.deciding() and world.counted()))


async def test_one_namespace_is_all_that_it_sees_if_told_so(start: Callable[[World], None]) -> None:
    world = World(namespace="prod")
    await world.create("test", "chat")
    await world.create("prod", "chat")
    start(world)
    await until(lambda: bool(world.deciding()))
    assert world.deciding() == {("prod", "chat")}


async def test_a_named_service_is_acted_on_before_it_is_there(start: Callable[[World], None]) -> None:
    world = World(namespace="default", only="chat")
    await world.create("default", "other")
    start(world)
    await until(lambda: bool(world.deciding()))
    [told] = world.journals.recent(1, service="chat")
    assert told["reason"] == "cannot tell: the store shows no PDService"
    assert world.deciding() == {("default", "chat")}


async def test_a_fault_in_one_loop_costs_the_others_nothing(start: Callable[[World], None]) -> None:
    world = World(faulty="bad")
    await world.create("prod", "bad")
    start(world)
    await until(lambda: ("prod", "bad") in world.asked)
    await world.create("prod", "chat")
    await until(lambda: ("prod", "chat") in world.deciding())


async def test_the_token_is_read_at_each_use(tmp_path: Path) -> None:
    path = tmp_path / "token"
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(204)

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, auth=FileToken(path)) as client:
        router = HttpRouter(client, "http://chat.prod.svc:9091/")
        with pytest.raises(RouterAway):
            await router.flip_wanted(after=0, timeout_s=0)
        for text in ("one\n", "two\n"):
            path.write_text(text)
            assert await router.flip_wanted(after=0, timeout_s=0) is None
    assert seen == ["Bearer one", "Bearer two"]


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("secret")
    return str(path)


def test_in_a_cluster_it_needs_nothing_but_store_and_token(token: str) -> None:
    options = parse_options(["--store", "in-cluster", "--token-file", token])
    assert options == Options(
        service=None,
        namespace="",
        store="in-cluster",
        router_state=IN_CLUSTER_STATE,
        token_file=Path(token),
        host="127.0.0.1",
        port=0,
    )
    assert options.router_of("prod", "chat") == "http://chat.prod.svc:9091"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            ["--store", "unix:/s"], "--router-state (nothing) is required in a local run", id="local"
        ),
        pytest.param(
            ["--store", "in-cluster", "--router-state", "http://chat:9091"],
            "--router-state (http://chat:9091) names one router, but --service names no service",
            id="one router for all",
        ),
        pytest.param(
            ["--store", "in-cluster", "--router-state", "ftp://{service}"],
            "--router-state (ftp://{service}) is not http://HOST:PORT",
            id="another scheme",
        ),
        pytest.param(
            ["--store", "in-cluster", "--router-state", "http://{service}:port"],
            "--router-state (http://{service}:port) is not http://HOST:PORT",
            id="a port that is none",
        ),
    ],
)
def test_bad_arguments(token: str, arguments: list[str], line: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_options([*arguments, "--token-file", token])
    assert str(caught.value).startswith(line)
