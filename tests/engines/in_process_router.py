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

from fulcrum_cli.local.engines import find_free_ports
from fulcrum_core.api.pdservice import TimeoutsSpec
from fulcrum_core.values import EngineIdentity, Role, Slo
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.kv_transfer.canaries import CanaryScheduler
from fulcrum_router.policy import PairKey, TransferOutcome
from fulcrum_router.policy.pair_record import TransferPair
from fulcrum_router.router import Router
from fulcrum_router.server import RouterServer, bind_socket
from fulcrum_router.settings import ServiceSettings, Tier, Timeouts
from tests.engines.requests import (
    CompletionRequest,
    CompletionResponse,
    request_prefill,
    send,
    with_cache_salt,
)
from tests.engines.services import DEADLINE_S, MODEL, START_S, D, P, RunningService, VllmService

TOKEN_IDS = range(32, 1000)
"""Token ids that the tiny model has."""
CANARY_TOKENS = 261
"""Two blocks and a little."""


class RecordingRandom(random.Random):
    """Remembers what it gave."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: list[int] = []

    def randrange(self, *args: int) -> int:  # type: ignore[override]
        self.drawn.append(super().randrange(*args))
        return self.drawn[-1]


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine as the router is told of it."""

    name: str
    role: Role
    port: int
    identity: EngineIdentity | None

    @property
    def url(self) -> str:
        """Of the engine itself."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class InProcessRouter:
    """The router, and where its clients are."""

    router: Router
    url: str
    client: httpx.AsyncClient

    def pair(self, prefill: str, decode: str) -> TransferPair:
        """What it has found out."""
        return self.router.pairs[PairKey(prefill, decode)]

    async def wait_for_outcome_counts(
        self, prefill: str, decode: str, count: int
    ) -> dict[TransferOutcome, int]:
        """What so many hand-offs came to; an answer is counted when its connection has ended it."""
        found = self.pair(prefill, decode).counts
        async with asyncio.timeout(DEADLINE_S):
            while sum(found.values()) < count:
                await asyncio.sleep(0.01)
        return dict(found)

    async def send(self, request: CompletionRequest) -> CompletionResponse:
        """Send it as a client."""
        return await send(self.client, self.url, request)

    @asynccontextmanager
    async def canaries(self, rng: random.Random) -> AsyncIterator[None]:
        """Canaries fly in here."""
        task = asyncio.create_task(CanaryScheduler(self.router, rng=rng).run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def wait_for_reasons(self, *reasons: str) -> None:
        """Returns once every pair that was tried has one of these reasons, and there are such."""
        async with asyncio.timeout(DEADLINE_S):
            while not self._have_reasons(reasons):
                await asyncio.sleep(0.05)

    def _have_reasons(self, reasons: Sequence[str]) -> bool:
        found = [pair.reason for pair in self.router.pairs.pairs.values()]
        return len(found) >= 2 and all(reason in reasons for reason in found)


@asynccontextmanager
async def run_in_process_router(*entries: EngineEntry) -> AsyncIterator[InProcessRouter]:
    """A router that serves these engines until the end of the block."""
    router = Router()
    tier = Tier("default", Slo(ttft_s=10.0, tpot_s=1.0))
    settings = ServiceSettings(
        service="own", model=MODEL, timeouts=Timeouts.from_spec(TimeoutsSpec()), default_tier=tier
    )
    router.configure(settings, last_prefill_to_decode_s=None)
    for entry in entries:
        instance = Instance(entry.name)
        instance.set_endpoint("127.0.0.1", entry.port)
        if entry.identity is not None:
            instance.set_identity(entry.identity)
        instance.assign(entry.role)
        router.fleet.add(instance)
    bound = bind_socket("127.0.0.1", 0, "--port")
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with (
        RouterServer(router).listening(bound),
        httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client,
    ):
        yield InProcessRouter(router, url, client)


async def list_engine_entries(service: VllmService) -> tuple[EngineEntry, EngineEntry]:
    """The service's engines, prefill first, as its own router knows them."""
    return await _build_engine_entry(service, P), await _build_engine_entry(service, D)


async def _build_engine_entry(service: VllmService, role: Role) -> EngineEntry:
    name = await service.find_instance(role)
    status = (await service.list_instances())[name].status
    assert status.endpoint is not None
    assert status.identity is not None
    return EngineEntry(name, role, int(status.endpoint.rpartition(":")[2]), status.identity.to_identity())


def generate_token_ids(rng: random.Random, length: int) -> list[int]:
    """A prompt of exactly so many tokens that nobody has seen."""
    return [rng.choice(TOKEN_IDS) for _ in range(length)]


def build_token_request(prompt: list[int], tokens: int = 8, *, stream: bool = False) -> CompletionRequest:
    """A completion of these very tokens."""
    return CompletionRequest("", tokens, stream=stream, extra={"prompt": prompt})


async def transfer_kv_directly(
    client: httpx.AsyncClient, prefill: EngineEntry, decode: EngineEntry, request: CompletionRequest
) -> CompletionResponse:
    """What decode answers to a hand-off that no router has judged. Its cache is left clean."""
    transfer_params = await request_prefill(client, prefill.url, request)
    del transfer_params["remote_prefill_cached_tokens"]
    return await send(client, decode.url, with_cache_salt(request, kv_transfer_params=transfer_params))


@dataclass(frozen=True, slots=True)
class ExtraEngine:
    """An engine started like another one, but by another program."""

    port: int
    process: subprocess.Popen[bytes] = field(repr=False)
    log: Path

    def is_running(self) -> bool:
        """Whether it has not died."""
        return self.process.poll() is None

    def wait_until_healthy(self) -> None:
        """Returns once it serves."""
        deadline_s = time.monotonic() + START_S
        while not _is_healthy(self.port):
            if not self.is_running() or time.monotonic() > deadline_s:
                pytest.fail(f"the extra engine did not start: {self.log.read_text()}")
            time.sleep(0.2)


@contextmanager
def start_extra_engine(service: RunningService, folder: Path, program: Path) -> Iterator[ExtraEngine]:
    """An engine like those of the service, run by this program; it comes up in its own time."""
    children = _read_proc_file(service.pid, f"task/{service.pid}/children").split()
    leader = next(pid for pid in map(int, children) if "serve" in _read_nul_separated(pid, "cmdline"))
    port, side_channel = find_free_ports("127.0.0.1", 2)
    argv = _read_nul_separated(leader, "cmdline")
    argv[1], argv[argv.index("--port") + 1] = str(program), str(port)
    environment = dict(word.split("=", 1) for word in _read_nul_separated(leader, "environ") if "=" in word)
    environment |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel), "TMPDIR": str(folder)}
    path = folder / "extra-engine.log"
    with path.open("wb") as log:
        command = [sys.executable, "-m", "fulcrum_cli.local.die_with_parent", *argv]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield ExtraEngine(port, process, path)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)


def _read_nul_separated(process: int, file: str) -> list[str]:
    return _read_proc_file(process, file).rstrip("\0").split("\0")


def _read_proc_file(process: int, file: str) -> str:
    return Path(f"/proc/{process}/{file}").read_text(encoding="utf-8")


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
