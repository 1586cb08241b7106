"""A router process with a store and engine servers: correct responses during flips, state port, shutdown."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.store_server import serve_store
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.router_state import FlipRequest, RouterState
from fulcrum_core.values import Role
from fulcrum_router.server import is_compiled
from fulcrum_simulator.text import output_text, prompt_digest
from tests.integration.simulator.servers import DEADLINE_S, MODEL, Server, launch, ready
from tests.objects import make_object

TOKEN = "a-token"
FLIPS = 20
SINCE = "2026-01-01T00:00:00Z"
IDENTITY = {"model": MODEL, "engine": "e", "kvDtype": "bf16", "blockSize": 16, "tensorParallel": 1}


@dataclass
class RunningService:
    """A router process, its store and its engines."""

    store: MemoryStore
    router: subprocess.Popen[str]
    engines: dict[str, Server]
    session: aiohttp.ClientSession
    port: int
    state_port: int
    metrics_port: int

    async def complete(self, prompt: str, tokens: int = 4) -> tuple[int, str, dict[str, str]]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens}
        async with self.session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body) as response:
            content = await response.json()
            text = content["choices"][0]["text"] if response.status == 200 else json.dumps(content)
            return response.status, text, {k.lower(): v for k, v in response.headers.items()}

    async def get_state(self, path: str = "/state", token: str = TOKEN) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.session.get(f"http://127.0.0.1:{self.state_port}{path}", headers=headers) as response:
            return response.status, await response.text()

    async def flip(self, name: str, role: Role) -> int:
        """Patch the assignment and return its new generation."""
        patch = {"spec": {"roles": {name: {"role": role, "by": "Person"}}}}
        return (await self.store.patch(PDAssignment, "s", patch, namespace="default")).metadata.generation


def expected_text(prompt: str, tokens: int = 4) -> str:
    return output_text(prompt_digest(prompt.encode()), tokens)


@contextmanager
def router_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "fulcrum_router", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def read_ports(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), DEADLINE_S)
    ports: dict[str, int] = json.loads(line.removeprefix("ready "))
    return ports


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Server]]:
    """Three engine servers with the profile `laptop`."""
    processes = {f"s-{n}": launch("laptop", "--port", "0") for n in range(3)}
    servers = {name: ready(process) for name, process in processes.items()}
    yield servers
    for server in servers.values():
        server.kill()


@pytest.fixture
async def service(tmp_path: Path, engines: dict[str, Server]) -> AsyncIterator[RunningService]:
    """A service of the three engines: the first has the prefill role, the others decode."""
    store, path, token = MemoryStore(SystemClock()), tmp_path / "store.sock", tmp_path / "token"
    token.write_text(TOKEN)
    autoscaling = {"policy": "arrow"}  # the one that the router may ask for a flip
    spec = {"model": MODEL, "instances": 3, "autoscaling": autoscaling}
    await store.create(make_object(PDService, "s", spec))
    for name, engine in engines.items():
        engine_spec = {"type": "Simulated", "profile": "laptop"}
        spec = {"service": "s", "pool": "s-flex", "model": MODEL, "engine": engine_spec}
        await store.create(make_object(PDInstance, name, spec))
        status = {"phase": "Serving", "endpoint": f"127.0.0.1:{engine.port}", "identity": IDENTITY}
        await store.patch_status(PDInstance, name, status, namespace="default")
    roles = {
        n: {"role": "Prefill" if n == "s-0" else "Decode", "since": SINCE, "by": "Operator"} for n in engines
    }
    await store.create(make_object(PDAssignment, "s", {"service": "s", "roles": roles}))
    arguments = ("--service", "s", "--store", f"unix:{path}", "--token-file", str(token))
    async with serve_store(store, path), aiohttp.ClientSession() as session:
        with router_process(*arguments) as process:
            ports = await read_ports(process)
            running = RunningService(
                store,
                process,
                engines,
                session,
                ports["port"],
                ports["state_port"],
                ports["metrics_port"],
            )
            assert (await running.get_state("/state?min_generation=1&timeout_s=20"))[0] == 200
            yield running


async def test_metrics_are_on_their_own_port_without_a_token(service: RunningService) -> None:
    await service.complete("the quick brown fox")
    async with service.session.get(f"http://127.0.0.1:{service.metrics_port}/metrics") as response:
        assert (response.status, response.content_type) == (200, "text/plain")
        assert 'fulcrum_router_requests_total{outcome="ok",tier="default"} 1.0' in await response.text()
    async with service.session.get(f"http://127.0.0.1:{service.port}/metrics") as response:
        assert response.status == 404


async def test_text_is_right_after_a_kv_transfer(service: RunningService) -> None:
    status, text, headers = await service.complete("the quick brown fox")
    assert (status, text) == (200, expected_text("the quick brown fox"))
    assert (headers["x-fulcrum-prefill"], headers["x-fulcrum-decode"]) == ("s-0", "s-1")
    assert "x-fulcrum-local-prefill" not in headers
    assert headers["x-fulcrum-simulated"] == "true"


async def test_text_is_right_while_roles_flip(service: RunningService) -> None:
    """Every flip is acknowledged, and every response is correct."""

    async def load(number: int) -> list[bool]:
        prompts = [f"prompt {number} {n} " * 20 for n in range(12)]
        return [(await service.complete(prompt))[:2] == (200, expected_text(prompt)) for prompt in prompts]

    async def flips() -> None:
        for turn in range(FLIPS):
            await service.flip(f"s-{turn % 3}", Role.DECODE if turn % 2 else Role.PREFILL)
            generation = await service.flip(f"s-{(turn + 1) % 3}", Role.PREFILL if turn % 2 else Role.DECODE)
            _, text = await service.get_state(
                f"/state?min_generation={generation - 1}&timeout_s={DEADLINE_S}"
            )
            assert RouterState.model_validate_json(text).generation >= 1

    async with asyncio.timeout(4 * DEADLINE_S):
        flipping = asyncio.create_task(flips())
        results = await asyncio.gather(*(load(n) for n in range(6)))
        await flipping
    assert [all(one) for one in results] == [True] * 6


async def test_the_state_needs_the_token(service: RunningService) -> None:
    assert [(await service.get_state(path, token="wrong"))[0] for path in ("/state", "/flip-requests")] == [
        401,
        401,
    ]


async def test_the_state_reports_every_instance_and_request(service: RunningService) -> None:
    for n in range(3):
        await service.complete(f"prompt {n}")
    state = RouterState.model_validate_json((await service.get_state())[1])
    assert {(i.name, i.role, i.serving, i.legs, i.pending_transfers) for i in state.instances} == {
        ("s-0", Role.PREFILL, True, 0, 0),
        ("s-1", Role.DECODE, True, 0, 0),
        ("s-2", Role.DECODE, True, 0, 0),
    }
    [tier] = state.tiers
    assert (state.service, tier.offered, tier.ok, state.local_prefills) == ("s", 3, 3, 0)


async def test_the_long_poll_returns_when_its_generation_is_applied(service: RunningService) -> None:
    poll = asyncio.create_task(service.get_state("/state?min_generation=2&timeout_s=30"))
    await service.get_state()
    assert not poll.done()
    assert await service.flip("s-1", Role.PREFILL) == 2
    _, text = await asyncio.wait_for(poll, DEADLINE_S)
    state = RouterState.model_validate_json(text)
    assert (state.generation, {i.name: i.role for i in state.instances}["s-1"]) == (2, Role.PREFILL)
    assert abs(state.acknowledged_at_s - time.time()) < DEADLINE_S


async def test_a_long_poll_that_times_out_returns_the_current_state(service: RunningService) -> None:
    assert (await service.get_state("/flip-requests?after=0&timeout_s=0.01"))[0] == 204
    status, text = await service.get_state("/state?min_generation=99&timeout_s=0.01")
    assert (status, RouterState.model_validate_json(text).generation) == (200, 1)
    assert (await service.get_state("/state?min_generation=nan"))[0] == 400


async def test_a_queue_beyond_the_slo_requests_a_flip_at_once(service: RunningService) -> None:
    poll = asyncio.create_task(service.get_state("/flip-requests?after=0&timeout_s=30"))
    requests = [asyncio.create_task(service.complete(f"{n} " + "x" * 6_000)) for n in range(12)]
    _, text = await asyncio.wait_for(poll, DEADLINE_S)
    for request in requests:
        request.cancel()
    await asyncio.wait(requests)
    flip_request = FlipRequest.model_validate_json(text)
    assert (flip_request.role, flip_request.seq >= 1) == (Role.PREFILL, True)


async def test_the_router_keeps_serving_while_the_store_is_unavailable(
    service: RunningService, tmp_path: Path
) -> None:
    (tmp_path / "store.sock").unlink()
    assert (await service.complete("a prompt"))[:2] == (200, expected_text("a prompt"))


async def test_the_router_exits_with_0_on_sigterm(service: RunningService) -> None:
    service.router.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(service.router.wait, DEADLINE_S) == 0


def test_a_port_in_use_is_one_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with router_process("--static", "decode=127.0.0.1:1", "--port", str(port)) as process:
            out, err = process.communicate(timeout=DEADLINE_S)
    expected = f"error: --port (127.0.0.1:{port}) cannot be bound: address already in use\n"
    assert (process.returncode, out, err) == (2, "", expected)


def test_bad_arguments_are_one_line_and_exit_code_2() -> None:
    with router_process("--port", "many") as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err.count("\n"), err.startswith("error: ")) == (2, "", 1, True)


STOP_AT_FIRST_IMPORT = """
import os, runpy, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "fulcrum_router.server":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Stop())
sys.argv = ["fulcrum_router", "--static", "decode=127.0.0.1:9"]
runpy.run_module("fulcrum_router", run_name="__main__", alter_sys=True)
"""


FAIL_WITH_A_PROMPT = """
import runpy, sys
import structlog
import fulcrum_router.server

async def fail(*_, **__):
    try:
        raise ValueError("once upon a time")
    except ValueError:
        structlog.get_logger().exception("something failed")

fulcrum_router.server.serve = fail
sys.argv = ["fulcrum_router", "--static", "decode=127.0.0.1:9"]
runpy.run_module("fulcrum_router", run_name="__main__", alter_sys=True)
"""


def test_a_router_logs_exceptions_without_their_texts() -> None:
    """They may hold part of a prompt."""
    done = subprocess.run(
        [sys.executable, "-c", FAIL_WITH_A_PROMPT], capture_output=True, text=True, timeout=60, check=True
    )
    [line] = map(json.loads, done.stderr.splitlines())
    assert (line["event"], line["exception"]["type"]) == ("something failed", "ValueError")
    assert "once upon a time" not in done.stdout + done.stderr


def test_a_router_that_is_stopped_while_it_starts_ends() -> None:
    """Pid 1 of a container ignores a signal without a handler: the router would start, and become active."""
    done = subprocess.run(
        [sys.executable, "-c", STOP_AT_FIRST_IMPORT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_data_path_is_compiled_where_the_tests_are_for_the_compiled_one() -> None:
    assert is_compiled() == (os.environ.get("TEST_LOT") == "compiled")
