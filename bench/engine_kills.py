"""An engine killed each second, and started again, behind a router with eight engines and a load of streams.

    make bench NAME=engine_kills ARGS="[--seconds N] [--rate R] [--tokens N] [--seed N]"

Four prefill and four decode instances (simulated engines). The streams are sound: greedy plain text, half of
them chats. Printed: streams by how they ended for their client, failures after the first byte by outcome, and
the reasons for which requests were not tried again.

Exit code 1 if a request failed before its first byte, if less than 95 % of the streams that lost their engine
went on with another, if one ended without an error event, or if a text is not the uninterrupted one.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator

import orjson
import uvloop
import yaml

from fulcrum_cluster.process import die_with_parent
from fulcrum_core.profiles import load_profile
from fulcrum_simulator.server import __main__ as engine_program
from fulcrum_simulator.text import output_text, prompt_digest, render_chat
from tests.integration.router.measured_router import run_measured_router
from tests.integration.simulator.servers import MODEL

ENGINES = 8
PACED = {"name": "paced", "startup_s": 0.0, "handshake_s": 0.01}
CONTINUED_MIN = 0.95
_HOST, _DEADLINE_S = "127.0.0.1", 60.0
_REPORT = re.compile(rb"(pid|ready) (\{[^}]*\})")
_OUTCOME = re.compile(r'fulcrum_router_stream_continuations_total\{outcome="(\w+)"\} (\d+)')
_REASON = re.compile(r'fulcrum_router_stopped_requests_total\{reason="(\w+)"\} (\d+)')


class EngineHost:
    """A process that forks engines: one that starts anew would take a second of processor time to import."""

    def __init__(self, process: asyncio.subprocess.Process, profile: str) -> None:
        self._process, self._profile = process, profile
        self._ready: dict[int, asyncio.Event] = {}
        self._known: dict[int, asyncio.Event] = {}
        """Whether the pid was read: the host may print it after the engine is ready."""
        self.pids: dict[int, int] = {}
        """By port."""

    async def start(self, port: int, side_channel_port: int) -> None:
        """Start an engine at these ports; returns when it is ready."""
        assert self._process.stdin is not None
        event, known = asyncio.Event(), asyncio.Event()
        self._ready[port], self._known[port] = event, known
        ports = ("--port", str(port), "--side-channel-port", str(side_channel_port))
        arguments = ["--name", "a", "--model", MODEL, "--profile", self._profile, *ports]
        self._process.stdin.write(orjson.dumps(arguments) + b"\n")
        async with asyncio.timeout(_DEADLINE_S):  # else a line that is lost would let the run wait for ever
            await event.wait()
            await known.wait()

    async def restart(self, port: int, side_channel_port: int) -> None:
        """Kill an engine and start it again as soon as its ports are free."""
        pid = self.pids[port]
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                await asyncio.sleep(0.01)
        await self.start(port, side_channel_port)

    async def read_lines(self) -> None:
        """Read the pids and the ready lines of the engines, until cancelled."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            for word, written in _REPORT.findall(line):  # processes that write at once may share a line
                fields = orjson.loads(written)
                if word == b"pid":
                    self.pids[fields["port"]] = fields["pid"]
                    self._known[fields["port"]].set()
                else:
                    self._ready[fields["port"]].set()


def run_host() -> None:
    """The host: fork an engine for each line of arguments on standard input."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    engine_program._PARENT_PID = os.getpid()  # it ends with its parent, which it reads when it is imported
    for line in sys.stdin.buffer:
        arguments = orjson.loads(line)
        pid = os.fork()
        if pid == 0:
            engine_program.main(arguments)
            os._exit(0)
        port = int(arguments[arguments.index("--port") + 1])
        # In one write: without buffers, `print` writes word by word, and engines write lines between them.
        os.write(sys.stdout.fileno(), b"pid %b\n" % orjson.dumps({"pid": pid, "port": port}))


@contextlib.asynccontextmanager
async def run_engines() -> AsyncIterator[tuple[EngineHost, list[tuple[int, int]]]]:
    """Run the engines; yields their host, and their ports with those of their side channels."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(yaml.safe_dump(load_profile("laptop").model_dump() | PACED))
        file.flush()
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--host", stdin=pipe, stdout=pipe
        )
        host = EngineHost(process, file.name)
        reading = asyncio.create_task(host.read_lines())
        free = find_ports(2 * ENGINES)
        ports = list(zip(free[::2], free[1::2], strict=True))
        try:
            await asyncio.gather(*(host.start(*pair) for pair in ports))
            yield host, ports
        finally:
            reading.cancel()
            process.kill()  # its engines end with it
            await process.wait()


def find_ports(count: int) -> list[int]:
    """Find ports that are free now, and that the system gives to no outgoing connection meanwhile."""
    free = list[int]()
    for port in random.sample(range(10_000, 20_000), 50 * count):
        with socket.socket() as tried:
            if tried.connect_ex((_HOST, port)) and len(free) < count:
                free.append(port)
    return free


async def kill_engines(
    host: EngineHost, ports: list[tuple[int, int]], seconds: float, rng: random.Random
) -> int:
    """Kill an engine each second, one that is up; return how many were killed."""
    starting: dict[int, asyncio.Task[None]] = {}
    killed, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        up = [n for n in range(ENGINES) if n not in starting or starting[n].done()]
        # At least one of each role stays.
        redundant = [n for n in up if sum(n // 4 == other // 4 for other in up) > 1]
        if redundant:
            number = rng.choice(redundant)
            starting[number] = asyncio.create_task(host.restart(*ports[number]))
            killed += 1
        await asyncio.sleep(1.0)
    await asyncio.gather(*starting.values())
    return killed


async def send_streams(
    port: int, *, rate: float, tokens: int, seconds: float, rng: random.Random
) -> Counter[str]:
    """Send streams at their rate; return how they ended."""
    ends, tasks, end_s = Counter[str](), list[asyncio.Task[None]](), time.monotonic() + seconds
    while time.monotonic() < end_s:
        tasks.append(asyncio.create_task(_send_stream(port, rng.randbytes(8).hex() * 20, tokens, ends)))
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*tasks)
    return ends


async def _send_stream(port: int, text: str, tokens: int, ends: Counter[str]) -> None:
    chat = text[0] < "8"
    messages = [{"role": "user", "content": text}]
    prompt = {"messages": messages} if chat else {"prompt": text}
    body = orjson.dumps({**prompt, "model": MODEL, "max_tokens": tokens, "temperature": 0, "stream": True})
    path = b"/v1/chat/completions" if chat else b"/v1/completions"
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    try:
        async with asyncio.timeout(_DEADLINE_S):
            reader, writer = await asyncio.open_connection(_HOST, port)
            writer.write(head % (path, len(body)) + body)
            received = await reader.read(-1)
            writer.close()
    except (OSError, TimeoutError) as error:
        ends[f"failed: {type(error).__name__}"] += 1
        return
    digest = prompt_digest(render_chat(messages) if chat else text.encode())
    ends[_judge(received, output_text(digest, tokens))] += 1


def _judge(received: bytes, expected: str) -> str:
    if not received.startswith(b"HTTP/1.1 200"):
        _, _, content = received.partition(b"\r\n\r\n")
        return f"failed: {received[9:12].decode() or 'closed'} {content.decode()}".rstrip()
    events = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
    texts = list[str]()
    for event in map(orjson.loads, events):
        for choice in event.get("choices", ()):
            texts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    text = "".join(texts)
    if b"data: [DONE]" in received:
        return "ok" if text == expected else "wrong text"
    if not expected.startswith(text):
        return "wrong text"
    if not events or b'"error"' not in events[-1]:
        return "cut off"
    return f"error event ({orjson.loads(events[-1])['error'].get('message')})"


def read_outcomes(metrics_port: int) -> tuple[dict[str, int], dict[str, int]]:
    """Read how streams went on whose engine failed, and why requests were not tried again."""
    with urllib.request.urlopen(f"http://{_HOST}:{metrics_port}/metrics", timeout=10) as response:
        page = response.read().decode()
    outcomes, reasons = (
        {name: int(count) for name, count in pattern.findall(page)} for pattern in (_OUTCOME, _REASON)
    )
    return outcomes, reasons


async def run(seconds: float, rate: float, tokens: int, seed: int) -> int:
    """Run and print the report; return the exit code."""
    rng = random.Random(seed)
    async with run_engines() as (host, ports):
        http_ports = [port for port, _ in ports]
        async with run_measured_router(http_ports[:4], http_ports[4:]) as router:
            killing = asyncio.create_task(kill_engines(host, ports, seconds, random.Random(seed + 1)))
            ends = await send_streams(router.port, rate=rate, tokens=tokens, seconds=seconds, rng=rng)
            killed = await killing
            await asyncio.sleep(1.1)  # a page of metrics is rendered once a second
            outcomes, reasons = await asyncio.to_thread(read_outcomes, router.metrics_port)
    failed = sum(count for end, count in ends.items() if end.startswith("failed"))
    broken = sum(outcomes.values())
    share = outcomes.get("continued", 0) / broken if broken else 0.0
    print(f"{killed} engines killed in {seconds:.0f} s; seed {seed}")
    print(f"{sum(ends.values())} streams: " + ", ".join(f"{n} {end}" for end, n in ends.most_common()))
    print(f"{broken} failures after the first byte: {outcomes}; continued: {share:.1%}")
    print(f"failed before the first byte: {failed}; not tried again: {reasons}")
    met = failed == 0 and share >= CONTINUED_MIN and not ends["cut off"] and not ends["wrong text"]
    return 0 if met else 1


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time with kills (%(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="streams a second (%(default)s)")
    parser.add_argument("--tokens", type=int, default=60, help="output tokens of a stream (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests and kills (%(default)s)")
    parser.add_argument("--host", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.host:
        run_host()
        return
    sys.exit(uvloop.run(run(given.seconds, given.rate, given.tokens, given.seed)))


if __name__ == "__main__":
    main()
