"""The open-loop load generator: sends each request at its intended time, however slow the service is.

Latencies count from the intended time. A generator that falls behind, or a wait for a connection, therefore
shows as latency and not as a lower request rate. `fulcrum play`, tests and `bench` send with it; what to send
is the workload's.
"""

import asyncio
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from fulcrum_core.values import Slo
from fulcrum_simulator.client.connection import HttpConnection
from fulcrum_simulator.client.exchange import HttpExchange
from fulcrum_simulator.client.outcomes import LoadOutcome, LoadResults
from fulcrum_simulator.client.prompts import PreparedRequest, prepare_request, prepare_token_request
from fulcrum_simulator.workload import WorkloadRequest

UNFINISHED = "unfinished when the run ended"
"""Reason of requests that had no outcome when the run ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """The service that receives the load, and the form of the requests.

    All requests stream, for the sake of TTFT.
    """

    host: str
    port: int
    model: str
    chat_share: float = 0.0
    """Share of the requests sent as chat, 0 to 1; the others are plain completions."""
    has_real_model: bool = False
    """Whether the text of the responses is not known: prompts are token ids, and tokens are only counted."""
    block_tokens: int = 0
    """Tokens of a block of the workload's `prefix_hash_ids`; 0: no two prompts begin alike."""
    degraded_tokens: int = 0
    """Output tokens to which admission may limit an answer, if its usage says so; 0: to none."""
    max_connections: int = 1024
    """Limit of open connections; requests beyond it wait and are counted in `connection_waits`."""


def split_address(url: str) -> tuple[str, int]:
    """Return host and port of the URL of a service; it must have both."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return address.hostname, address.port


class LoadGenerator:
    """Sends workloads to one service and records the outcome of each request.

    One `send` runs at a time; consecutive ones share the results and the connections. The same seed writes
    the same prompts.
    """

    def __init__(self, target: LoadTarget, *, slo: Slo, seed: int) -> None:
        self.results = LoadResults(slo)
        self._target = target
        self._seed = seed
        self._rng = random.Random(seed)
        self._free: list[HttpConnection] = []
        self._open: set[HttpConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[HttpExchange] = deque()
        self._all_ended = asyncio.Event()

    async def send(self, requests: Iterable[WorkloadRequest], *, start_s: float | None = None) -> None:
        """Send each request at `start_s` plus its arrival time. Returns after the last request was sent.

        `start_s` is a time of the event loop's clock; None is now.
        """
        loop = asyncio.get_running_loop()
        load_start_s = loop.time() if start_s is None else start_s
        for request in requests:
            intended_s = load_start_s + request.arrival_s
            if (wait_s := intended_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            self._send_one(request, intended_s)

    async def finish(self, *, timeout_s: float) -> None:
        """Wait up to `timeout_s` for all responses, then end the rest as unfinished and close all
        connections.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.results.in_flight:
                    self._all_ended.clear()
                    await self._all_ended.wait()
        except TimeoutError:
            pass
        await self.close()

    async def close(self) -> None:
        """End all requests in flight as unfinished and close all connections."""
        now_s = asyncio.get_running_loop().time()
        while self._waiting:
            self._waiting.popleft().on_lost(UNFINISHED, now_s)
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._open):
            connection.abort(UNFINISHED)
        while self._open:
            await asyncio.sleep(0)

    def _send_one(self, request: WorkloadRequest, intended_s: float) -> None:
        index = self.results.record_offered(request.tier)
        prepared = self._prepare(request, index)
        self._assign_connection(
            HttpExchange(
                prepared,
                index=index,
                intended_s=intended_s,
                on_end=self._record_end,
                degraded_tokens=self._target.degraded_tokens,
            )
        )

    def _prepare(self, request: WorkloadRequest, index: int) -> PreparedRequest:
        model, seed = self._target.model, self._seed
        if self._target.has_real_model:
            return prepare_token_request(request, model=model, seed=seed, index=index)
        chat = self._rng.random() < self._target.chat_share
        return prepare_request(
            request,
            model=model,
            seed=seed,
            index=index,
            chat=chat,
            block_tokens=self._target.block_tokens,
        )

    def _assign_connection(self, exchange: HttpExchange) -> None:
        """Send the exchange on a free connection, else on a new one, else queue it for one."""
        if self._free:
            self._free.pop().send(exchange, host=self._target.host)
        elif len(self._open) + len(self._connecting) < self._target.max_connections:
            self._connect_for(exchange)
        else:
            self.results.connection_waits += 1
            self._waiting.append(exchange)

    def _connect_for(self, exchange: HttpExchange) -> None:
        task = asyncio.create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, exchange: HttpExchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                self._new_connection, self._target.host, self._target.port
            )
        except OSError as error:
            exchange.on_lost(f"cannot connect: {type(error).__name__}", loop.time())
            self._send_waiting()
        except asyncio.CancelledError:
            exchange.on_lost(UNFINISHED, loop.time())
            raise
        else:
            self._open.add(connection)
            connection.send(exchange, host=self._target.host)

    def _new_connection(self) -> HttpConnection:
        return HttpConnection(self._on_connection_free, self._on_connection_closed)

    def _on_connection_free(self, connection: HttpConnection) -> None:
        if self._waiting:
            connection.send(self._waiting.popleft(), host=self._target.host)
        else:
            self._free.append(connection)

    def _on_connection_closed(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        if connection in self._free:
            self._free.remove(connection)
        self._send_waiting()

    def _send_waiting(self) -> None:
        if self._waiting:
            self._connect_for(self._waiting.popleft())

    def _record_end(self, outcome: LoadOutcome) -> None:
        self.results.record_outcome(outcome)
        if not self.results.in_flight:
            self._all_ended.set()
