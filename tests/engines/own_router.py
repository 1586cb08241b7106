"""A router of a test's own over real engines: it believes of them what the test tells it."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from fulcrum_cli.local.engines import free_ports
from fulcrum_core.api.pdservice import TimeoutsSpec
from fulcrum_core.values import Identity, Role, Slo
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.kv_transfer.canaries import Canaries
from fulcrum_router.policy import PairKey, Proof
from fulcrum_router.policy.pairs import Pair
from fulcrum_router.router import Router
from fulcrum_router.server import Server, bind
from fulcrum_router.settings import Settings, Tier, Timeouts
from tests.engines.asking import Answer, Ask, ask, prefilled, salted
from tests.engines.real import DEADLINE_S, MODEL, START_S, D, P, RealService, Up

IDS = range(32, 1000)
"""Token ids that the tiny model has."""
CANARY_TOKENS = 261
"""Two blocks and a little."""


class Recording(random.Random):
    """Remembers what it gave."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.given: list[int] = []

    def randrange(self, *args: int) -> int:  # type: ignore[override]
        self.given.append(super().randrange(*args))
        return self.given[-1]


@dataclass(frozen=True, slots=True)
class Member:
    """An engine as the router is told of it."""

    name: str
    role: Role
    port: int
    identity: Identity | None

    @property
    def url(self) -> str:
        """Of the engine itself."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class OwnRouter:
    """The router, and where its clients are."""

    router: Router
    url: str
    client: httpx.AsyncClient

    def pair(self, prefill: str, decode: str) -> Pair:
        """What it has found out."""
        return self.router.pairs[PairKey(prefill, decode)]

    async def counts(self, prefill: str, decode: str, count: int) -> dict[Proof, int]:
        """What so many hand-offs came to; an answer is counted when its connection has ended it."""
        found = self.pair(prefill, decode).counts
        async with asyncio.timeout(DEADLINE_S):
            while sum(found.values()) < count:
                await asyncio.sleep(0.01)
        return dict(found)

    async def ask(self, asked: Ask) -> Answer:
        """Ask it as a client."""
        return await ask(self.client, self.url, asked)

    @asynccontextmanager
    async def canaries(self, rng: random.Random) -> AsyncIterator[None]:
        """Canaries fly in here."""
        flying = asyncio.create_task(Canaries(self.router, rng=rng).run())
        try:
            yield
        finally:
            flying.cancel()
            with suppress(asyncio.CancelledError):
                await flying

    async def until_known(self, *reasons: str) -> None:
        """Returns once every pair that was tried has one of these reasons, and there are such."""
        async with asyncio.timeout(DEADLINE_S):
            while not self._known(reasons):
                await asyncio.sleep(0.05)

    def _known(self, reasons: Sequence[str]) -> bool:
        found = [pair.reason for pair in self.router.pairs.pairs.values()]
        return len(found) >= 2 and all(reason in reasons for reason in found)


@asynccontextmanager
async def own_router(*members: Member) -> AsyncIterator[OwnRouter]:
    """A router that serves these engines until the end of the block."""
    router = Router()
    tier = Tier("default", Slo(ttft_s=10.0, tpot_s=1.0))
    settings = Settings(service="own", model=MODEL, timeouts=Timeouts.of(TimeoutsSpec()), default_tier=tier)
    router.configure(settings, last_to_decode_s=None)
    for member in members:
        instance = Instance(member.name)
        instance.place("127.0.0.1", member.port)
        if member.identity is not None:
            instance.know(member.identity)
        instance.assign(member.role)
        router.fleet.add(instance)
    bound = bind("127.0.0.1", 0, "--port")
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with (
        Server(router).listening(bound),
        httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client,
    ):
        yield OwnRouter(router, url, client)


async def members_of(service: RealService) -> tuple[Member, Member]:
    """The service's engines, prefill first, as its own router knows them."""
    return await _member(service, P), await _member(service, D)


async def _member(service: RealService, role: Role) -> Member:
    name = await service.engine(role)
    status = (await service.instances())[name].status
    assert status.endpoint is not None
    assert status.identity is not None
    return Member(name, role, int(status.endpoint.rpartition(":")[2]), status.identity.value())


def ids(rng: random.Random, length: int) -> list[int]:
    """A prompt of exactly so many tokens that nobody has seen."""
    return [rng.choice(IDS) for _ in range(length)]


def of_ids(prompt: list[int], tokens: int = 8, *, stream: bool = False) -> Ask:
    """A completion of these very tokens."""
    return Ask("", tokens, stream=stream, more={"prompt": prompt})


async def handed_by_hand(client: httpx.AsyncClient, prefill: Member, decode: Member, asked: Ask) -> Answer:
    """What decode answers to a hand-off that no router has judged. Its cache is left clean."""
    handoff = await prefilled(client, prefill.url, asked)
    del handoff["remote_prefill_cached_tokens"]
    return await ask(client, decode.url, salted(asked, kv_transfer_params=handoff))


@dataclass(frozen=True, slots=True)
class Twin:
    """An engine started like another one, but by another program."""

    port: int
    process: subprocess.Popen[bytes] = field(repr=False)
    log: Path

    def runs(self) -> bool:
        """Whether it has not died."""
        return self.process.poll() is None

    def wait(self) -> None:
        """Returns once it serves."""
        deadline_s = time.monotonic() + START_S
        while not _is_healthy(self.port):
            if not self.runs() or time.monotonic() > deadline_s:
                pytest.fail(f"the twin did not come up: {self.log.read_text()}")
            time.sleep(0.2)


@contextmanager
def twin(service: Up, folder: Path, program: Path) -> Iterator[Twin]:
    """An engine like those of the service, run by this program; it comes up in its own time."""
    children = _text(service.pid, f"task/{service.pid}/children").split()
    leader = next(pid for pid in map(int, children) if "serve" in _words(pid, "cmdline"))
    port, side_channel = free_ports("127.0.0.1", 2)
    argv = _words(leader, "cmdline")
    argv[1], argv[argv.index("--port") + 1] = str(program), str(port)
    environment = dict(word.split("=", 1) for word in _words(leader, "environ") if "=" in word)
    environment |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel), "TMPDIR": str(folder)}
    path = folder / "twin.log"
    with path.open("wb") as log:
        tied = [sys.executable, "-m", "fulcrum_cli.local.die_with_parent", *argv]
        process = subprocess.Popen(tied, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Twin(port, process, path)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)


def _words(process: int, file: str) -> list[str]:
    return _text(process, file).rstrip("\0").split("\0")


def _text(process: int, file: str) -> str:
    return Path(f"/proc/{process}/{file}").read_text(encoding="utf-8")


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
