"""A router in the test's process over real engines; the test chooses the identities it believes."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from fulcrum_cli.local.engines import find_free_ports
from fulcrum_cluster.process import bind_socket
from fulcrum_core.api.router import TimeoutsSpec
from fulcrum_core.values import EngineIdentity, Role, Slo
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.kv_transfer.canaries import CanaryScheduler
from fulcrum_router.policy import PairKey, TransferOutcome
from fulcrum_router.policy.kv_pairs.pair_record import TransferPair
from fulcrum_router.router import Router
from fulcrum_router.server import RouterServer
from fulcrum_router.settings import ServiceSettings, Tier, Timeouts
from tests.engines.completions import (
    CompletionRequest,
    CompletionResponse,
    request_prefill,
    send,
    with_cache_salt,
)
from tests.engines.services import DEADLINE_S, MODEL, START_S, D, P, RunningService, VllmService
from tests.waiting import wait_until
from tools.kubernetes.waiting import wait_for

TOKEN_IDS = range(32, 1000)
"""Token ids of the tiny model's vocabulary."""
CANARY_TOKENS = 261
"""Prompt length of a canary: two blocks of 128 tokens and five more."""


class RecordingRandom(random.Random):
    """Records the numbers it drew."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: list[int] = []

    def randrange(self, *args: int) -> int:  # type: ignore[override]
        self.drawn.append(super().randrange(*args))
        return self.drawn[-1]


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """What the router believes about one engine."""

    name: str
    role: Role
    port: int
    identity: EngineIdentity | None

    @property
    def url(self) -> str:
        """URL of the engine."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class InProcessRouter:
    """The router, its URL and a client."""

    router: Router
    url: str
    client: httpx.AsyncClient

    def pair(self, prefill: str, decode: str) -> TransferPair:
        """Return what the router knows of this directed pair."""
        return self.router.pairs[PairKey(prefill, decode)]

    async def wait_for_outcome_counts(
        self, prefill: str, decode: str, count: int
    ) -> dict[TransferOutcome, int]:
        """Wait until the pair has `count` KV transfers with an outcome; return the counts."""
        found = self.pair(prefill, decode).counts
        await wait_until(
            lambda: sum(found.values()) >= count, f"{count} KV transfers counted", timeout_s=DEADLINE_S
        )
        return dict(found)

    async def send(self, request: CompletionRequest) -> CompletionResponse:
        """Send the request through the router."""
        return await send(self.client, self.url, request)

    @asynccontextmanager
    async def canaries(self, rng: random.Random) -> AsyncIterator[None]:
        """Send canaries while the block runs."""
        task = asyncio.create_task(CanaryScheduler(self.router, rng=rng).run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def wait_for_reasons(self, *reasons: str) -> None:
        """Wait until at least two pairs exist and each has one of these reasons."""
        await wait_until(
            lambda: self._have_reasons(reasons), f"all pairs {' or '.join(reasons)}", timeout_s=DEADLINE_S
        )

    def _have_reasons(self, reasons: Sequence[str]) -> bool:
        found = [pair.reason for pair in self.router.pairs.pairs.values()]
        return len(found) >= 2 and all(reason in reasons for reason in found)


@asynccontextmanager
async def run_in_process_router(*entries: EngineEntry) -> AsyncIterator[InProcessRouter]:
    """Run a router over these engines while the block runs."""
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
    bound = bind_socket("127.0.0.1", 0, option="--port")
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with (
        RouterServer(router).listening(bound),
        httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client,
    ):
        yield InProcessRouter(router, url, client)


async def list_engine_entries(service: VllmService) -> tuple[EngineEntry, EngineEntry]:
    """Return the service's engines, prefill first, with the identities from their PDInstances."""
    return await _build_engine_entry(service, P), await _build_engine_entry(service, D)


async def _build_engine_entry(service: VllmService, role: Role) -> EngineEntry:
    name = await service.find_instance(role)
    status = (await service.list_instances())[name].status
    assert status.endpoint is not None
    assert status.identity is not None
    return EngineEntry(name, role, int(status.endpoint.rpartition(":")[2]), status.identity.to_identity())


def generate_token_ids(rng: random.Random, length: int) -> list[int]:
    """Return a random prompt of `length` tokens, so that no cache holds it."""
    return [rng.choice(TOKEN_IDS) for _ in range(length)]


def build_token_request(prompt: list[int], tokens: int = 8, *, stream: bool = False) -> CompletionRequest:
    """Return a completion request with these token ids as its prompt."""
    return CompletionRequest("", tokens, stream=stream, extra={"prompt": prompt})


async def transfer_kv_directly(
    client: httpx.AsyncClient, prefill: EngineEntry, decode: EngineEntry, request: CompletionRequest
) -> CompletionResponse:
    """Send prefill's KV transfer parameters to decode without a router's checks, under an own cache salt."""
    transfer_params = await request_prefill(client, prefill.url, request)
    del transfer_params["remote_prefill_cached_tokens"]
    return await send(client, decode.url, with_cache_salt(request, kv_transfer_params=transfer_params))


@dataclass(frozen=True, slots=True)
class ExtraEngine:
    """An engine with the command line of another one, run by another program."""

    port: int
    process: subprocess.Popen[bytes] = field(repr=False)
    log: Path

    def is_running(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def wait_until_healthy(self) -> None:
        """Wait until the engine serves; fail with its log if it ends or takes longer than `START_S`."""
        with suppress(TimeoutError):
            wait_for(
                lambda: _is_healthy(self.port) or not self.is_running(),
                "the extra engine is healthy",
                timeout_s=START_S,
            )
        if not self.is_running() or not _is_healthy(self.port):
            pytest.fail(f"the extra engine did not start: {self.log.read_text()}")


@contextmanager
def start_extra_engine(service: RunningService, folder: Path, program: Path) -> Iterator[ExtraEngine]:
    """Start an engine with the service's command line, run by `program`; does not wait until it serves."""
    children = _read_proc_file(service.pid, f"task/{service.pid}/children").split()
    leader = next(pid for pid in map(int, children) if "serve" in _read_nul_separated(pid, "cmdline"))
    port, side_channel = find_free_ports("127.0.0.1", 2)
    argv = _read_nul_separated(leader, "cmdline")
    argv[1], argv[argv.index("--port") + 1] = str(program), str(port)
    environment = dict(word.split("=", 1) for word in _read_nul_separated(leader, "environ") if "=" in word)
    environment |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel), "TMPDIR": str(folder)}
    path = folder / "extra-engine.log"
    with path.open("wb") as log:
        command = [sys.executable, "-m", "fulcrum_cli.local.exec_with_parent", *argv]
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
