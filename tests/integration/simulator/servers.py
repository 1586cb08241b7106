"""Engine servers as processes, and the HTTP requests that tests send to them."""

import json
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from fulcrum_simulator.text import output_text, prompt_digest
from tests.waiting import wait_until

MODEL = "tiny"
BLOCK_TOKENS = 16
BLOCKS = 64
DEADLINE_S = 20.0
PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Server:
    """One engine server process."""

    process: subprocess.Popen[str]
    url: str
    port: int
    side_channel_port: int

    def kill(self) -> None:
        """Kill the process and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()


Start = Callable[..., Server]


def launch(profile: Path | str, *arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start an engine server process, without waiting until it is ready.

    A pipe that nobody reads holds 64 KiB: after some minutes of failures a server would wait to log the next.
    """
    command = [sys.executable, "-m", "fulcrum_simulator.server", "--name", "a", "--model", MODEL]
    return subprocess.Popen(
        [*command, "--profile", str(profile), *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def ready(process: subprocess.Popen[str]) -> Server:
    """Wait for the ready line of a server; fails after `DEADLINE_S`. Return its ports."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
    line = process.stdout.readline() if readable else ""
    assert line.startswith("ready "), (line, process.poll())
    ports = json.loads(line.removeprefix("ready "))
    return Server(process, f"http://127.0.0.1:{ports['port']}", ports["port"], ports["side_channel_port"])


class Client:
    """HTTP client of the tests for engine servers."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(
        self, server: Server, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        async with self._session.post(server.url + path, json=body, headers=headers) as reply:
            return reply.status, await reply.json(content_type=None)

    async def complete(self, server: Server, prompt: str, tokens: int, **fields: Any) -> dict[str, Any]:
        """Send a completion request, assert status 200 and return the response."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, **fields}
        status, response = await self.post(server, "/v1/completions", body)
        assert status == 200, response
        return response

    async def text(self, server: Server, prompt: str, tokens: int, **fields: Any) -> str:
        response = await self.complete(server, prompt, tokens, **fields)
        text: str = response["choices"][0]["text"]
        return text

    async def prefill(self, server: Server, prompt: str) -> dict[str, Any]:
        """Send a prefill leg and return the KV transfer parameters."""
        response = await self.complete(server, prompt, 1, kv_transfer_params=PREFILL_ONLY)
        kv_transfer_params: dict[str, Any] = response["kv_transfer_params"]
        return kv_transfer_params

    async def get(self, server: Server, path: str) -> dict[str, Any]:
        async with self._session.get(server.url + path) as response:
            found: dict[str, Any] = await response.json()
            return found

    async def stream(
        self, server: Server, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> list[str]:
        """Send a streamed request, assert status 200 and return the data of every event."""
        body = {"model": MODEL, "stream": True, **body}
        async with self._session.post(server.url + path, json=body, headers=headers) as response:
            assert response.status == 200
            raw = (await response.read()).decode()
        assert raw.endswith("\n\n")
        events = raw.removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    async def metric(self, server: Server, name: str, label: str = "") -> float:
        """Return the sum of the series of this name whose line contains `label`; 0 if there are none."""
        async with self._session.get(server.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{") and label in line
        )

    async def stats(self, server: Server) -> dict[str, Any]:
        return await self.get(server, "/simulator/stats")

    async def has_one_running(self, server: Server) -> bool:
        """Whether exactly one request runs on the server."""
        return bool((await self.stats(server))["running"] == 1)

    async def health(self, server: Server) -> int:
        async with self._session.get(server.url + "/health") as response:
            return response.status

    async def inject_fault(self, server: Server, kind: str, **fields: Any) -> None:
        status, response = await self.post(server, "/simulator/fault", {"kind": kind, **fields})
        assert (status, response) == (200, {"kind": kind})

    async def wait_until_idle(self, server: Server) -> None:
        """Wait until the server has no requests, no KV blocks in use and no leases."""
        await wait_until(lambda: self._is_idle(server))

    async def _is_idle(self, server: Server) -> bool:
        stats = await self.stats(server)
        return (stats["running"], stats["waiting"], stats["kv_usage"], stats["leases"]) == (0, 0, 0, 0)


async def wait_for_exit(server: Server) -> int:
    """Wait until the process has ended and return its exit code."""
    await wait_until(lambda: server.process.poll() is not None, "the process has ended")
    return int(server.process.returncode)


def prompt_of(name: str, tokens: int = 100) -> str:
    """Return a prompt of this many tokens. Prompts of different names differ in their first KV block."""
    return (f"{name} " * tokens * 4)[: tokens * 4]


def expected_text(prompt: str, tokens: int) -> str:
    """Return the text that a correct engine generates for this prompt."""
    return output_text(prompt_digest(prompt.encode()), tokens)


async def fill_cache(client: Client, server: Server, name: str) -> None:
    """Overwrite every free KV block, with two long prompts."""
    for part in range(2):
        await client.complete(server, prompt_of(f"{name} {part}", BLOCK_TOKENS * BLOCKS - 50), 1)
