"""The autoscaler as a process: its ready line, its HTTP port, its exit, and its refusal of bad arguments."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.waiting import wait_until

DEADLINE_S = 20.0


async def start(*args: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fulcrum_autoscaler",
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def arguments(tmp_path: Path, **changes: str) -> list[str]:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    given = {
        "service": "chat",
        "store": f"unix:{tmp_path}/store.sock",
        "router-state": "http://127.0.0.1:9",
        "token-file": str(token),
        "port": "0",
        **changes,
    }
    return [part for name, value in given.items() for part in (f"--{name}", value)]


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await start(*arguments(tmp_path))
    yield started
    if started.returncode is None:
        started.kill()
    await started.communicate()


async def ready_port(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
    marker, _, ports = line.decode().partition(" ")
    assert marker == "ready"
    port: int = json.loads(ports)["port"]
    return port


async def test_without_store_and_router_the_autoscaler_serves_http_and_holds(
    process: asyncio.subprocess.Process,
) -> None:
    port = await ready_port(process)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

        async def read_last_decision() -> list[dict[str, str]]:
            return list((await client.get("/decisions", params={"limit": 1})).json())

        await wait_until(read_last_decision, "the first decision")
        decisions = await read_last_decision()
        assert (decisions[0]["action"], decisions[0]["reason"]) == (
            "hold",
            "cannot decide: the store has no PDService",
        )
        assert (decisions[0]["namespace"], decisions[0]["service"]) == ("default", "chat")
        assert [(await client.get(f"/{name}")).status_code for name in ("healthz", "readyz")] == [200, 503]
        assert "fulcrum_autoscaler_decisions_total" in (await client.get("/metrics")).text
        assert (await client.get("/decisions", params={"limit": "many"})).status_code == 400


async def test_sigterm_stops_the_process_within_two_seconds_with_code_0(
    process: asyncio.subprocess.Process,
) -> None:
    await ready_port(process)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 2.0) == 0


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        pytest.param({"token-file": "/nowhere/token"}, "/nowhere/token", id="no token file"),
        pytest.param(
            {"store": "chat.sock"},
            "--store (chat.sock) is not unix: and a path",
            id="a store without a scheme",
        ),
        pytest.param({"router-state": "chat:9091"}, "--router-state (chat:9091) is not http://", id="no URL"),
        pytest.param({"router-state": "http://"}, "--router-state (http://) is not http://", id="no host"),
        pytest.param(
            {"router-state": "http://{pod}:1"},
            "--router-state (http://{pod}:1) is not",
            id="an unknown placeholder",
        ),
        pytest.param({"port": "http"}, "--port", id="a port that is not a number"),
        pytest.param(
            {"port": "99999"}, "--port (99999) is not between 0 and 65535", id="a port out of range"
        ),
    ],
)
async def test_bad_arguments_exit_with_one_line_and_code_2(
    tmp_path: Path, changes: dict[str, str], phrase: str
) -> None:
    process = await start(*arguments(tmp_path, **changes))
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    lines = err.decode().splitlines()
    assert (process.returncode, out, len(lines)) == (2, b"", 1)
    assert lines[0].startswith("error: ")
    assert phrase in lines[0]


async def test_a_port_in_use_exits_with_one_line_and_code_2(tmp_path: Path) -> None:
    holder = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
    async with holder:
        port = holder.sockets[0].getsockname()[1]
        process = await start(*arguments(tmp_path, port=str(port)))
        out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert (process.returncode, out, err.decode().count("\n")) == (2, b"", 1)
    assert str(port) in err.decode()
