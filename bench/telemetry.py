"""How much CPU per request a router spends on its metrics, and on metrics and traces together.

Three routers over the same eight fake engines get blocks of requests in turn, as fast as they serve them: one
is not scraped, one is scraped once a second, and one also traces. Each round has six blocks of a quarter of a
second for each router, in all six orders: what disturbs the machine for a second, and what a block leaves in
the caches for the next one, falls on each router alike. The first round is not counted.

All three count their requests, for the attainment and the causes of misses too. What counting takes is
measured in this process and subtracted from the first router. A cost is the CPU of all rounds per request,
divided by what is left; the range after it is the middle half of the rounds.

    python bench/telemetry.py [--rounds N] [--sampled SHARE]

Exit code 1 if the metrics cost more than 2 %, or metrics and sampled traces more than 5 %. Probes of the
engines and the scrape cost the same each second; a busy machine serves fewer requests in a second, so the
ratios rise on it.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from statistics import quantiles

import aiohttp
from aiohttp import web

from fulcrum_core.values import Slo
from fulcrum_router.counters import Counters, RequestOutcome
from fulcrum_router.policy.predictions.latency_parts import RequestTimes
from fulcrum_router.settings import Tier
from tests.integration.router.fake_engines import PROMPT, FakeEngine
from tests.integration.router.measured_router import read_cpu_s

BARS = {"metrics": 1.02, "metrics and traces": 1.05}
ENGINES, CONCURRENCY, BLOCK_S, SCRAPE_S = 8, 16, 0.25, 1.0


@dataclass
class BenchRouter:
    """One router process, and what it has used."""

    name: str
    process: subprocess.Popen[str]
    port: int
    metrics_port: int
    scraped: bool
    rounds_s: list[float] = field(default_factory=list)
    """Processor time of a request in each round."""
    used_s: float = 0
    """Processor time in this round."""
    ended: int = 0
    """Requests in this round."""
    total_s: float = 0
    requests: int = 0
    """Requests in all rounds."""

    @property
    def cost_s(self) -> float:
        """Processor time of a request over all rounds."""
        return self.total_s / self.requests

    def list_ratios(self, base: "BenchRouter", *, less_s: float) -> list[float]:
        """Processor time of a request, relative to `less_s` less than that of another router in its round."""
        pairs = zip(self.rounds_s, base.rounds_s, strict=True)
        return [own_s / (base_s - less_s) for own_s, base_s in pairs]

    def end_round(self, *, counts: bool) -> None:
        """Add this round to the result, if it counts, and begin the next one."""
        if counts:
            self.rounds_s.append(self.used_s / self.ended)
            self.total_s += self.used_s
            self.requests += self.ended
        self.used_s, self.ended = 0, 0


@contextmanager
def run_router(
    name: str, ports: list[int], *, scraped: bool, environment: dict[str, str]
) -> Iterator[BenchRouter]:
    """Run a router over engines at these ports."""
    half = len(ports) // 2
    static = [f"{role}=" + ",".join(f"127.0.0.1:{port}" for port in some)
              for role, some in (("prefill", ports[:half]), ("decode", ports[half:]))]  # fmt: skip
    command = [sys.executable, "-m", "fulcrum_router", "--static", *static]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline().removeprefix("ready "))
            yield BenchRouter(name, process, ready["port"], ready["metrics_port"], scraped)
        finally:
            process.terminate()


@asynccontextmanager
async def serve_receiver(received: list[int]) -> AsyncIterator[str]:
    """Accept OTLP requests; yields the URL."""

    async def accept(request: web.Request) -> web.Response:
        received.append(len(await request.read()))
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/traces", accept)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def scrape(client: aiohttp.ClientSession, router: BenchRouter) -> None:
    """Read the metrics once a second as Prometheus does, in the format with exemplars, until cancelled."""
    headers = {"accept": "application/openmetrics-text"}
    while True:
        url = f"http://127.0.0.1:{router.metrics_port}/metrics"
        async with client.get(url, headers=headers) as response:
            await response.read()
        await asyncio.sleep(SCRAPE_S)


async def send_block(client: aiohttp.ClientSession, router: BenchRouter) -> int:
    """Send streams for one block; returns how many ended."""
    until_s, body, ended = time.monotonic() + BLOCK_S, {**PROMPT, "stream": True}, 0

    async def send() -> None:
        nonlocal ended
        while time.monotonic() < until_s:
            async with client.post(f"http://127.0.0.1:{router.port}/v1/completions", json=body) as response:
                await response.read()
                ended += response.status == 200

    await asyncio.gather(*(send() for _ in range(CONCURRENCY)))
    return ended


async def measure_block(client: aiohttp.ClientSession, router: BenchRouter) -> None:
    """Send a block and add what it used to this round."""
    began_s = read_cpu_s(router.process.pid)
    router.ended += await send_block(client, router)
    router.used_s += read_cpu_s(router.process.pid) - began_s


async def measure_rounds(
    client: aiohttp.ClientSession, routers: list[BenchRouter], engines: list[FakeEngine], rounds: int
) -> None:
    """Send blocks to each router in turn; engines forget their requests after each round."""
    for number in range(rounds + 1):
        for order in itertools.permutations(routers):
            for router in order:
                await measure_block(client, router)
        for router in routers:
            router.end_round(counts=number > 0)  # the first round warms up
        for engine in engines:
            engine.requests.clear()


async def run(rounds: int, sampled: float) -> int:
    """Measure and report; returns the exit code."""
    engines = [FakeEngine(f"e{number}") for number in range(ENGINES)]
    received: list[int] = []
    async with contextlib.AsyncExitStack() as stack:
        servers = [await asyncio.start_server(engine.serve, "127.0.0.1", 0) for engine in engines]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        traces = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": await stack.enter_async_context(serve_receiver(received)),
            "OTEL_TRACES_SAMPLER_ARG": str(sampled),
        }
        routers = [
            stack.enter_context(run_router("not scraped", ports, scraped=False, environment={})),
            stack.enter_context(run_router("metrics", ports, scraped=True, environment={})),
            stack.enter_context(run_router("metrics and traces", ports, scraped=True, environment=traces)),
        ]
        client = await stack.enter_async_context(aiohttp.ClientSession())
        scrapers = [asyncio.ensure_future(scrape(client, router)) for router in routers if router.scraped]
        await measure_rounds(client, routers, engines, rounds)
        for scraper in scrapers:
            scraper.cancel()
        await asyncio.gather(*scrapers, return_exceptions=True)
        for server in servers:
            server.close()
    return report(routers, sampled, received)


def measure_counting(requests: int = 100_000) -> float:
    """Processor time of counting one stream without a tenant, and of dividing its time, in seconds."""
    counters, tier = Counters(), Tier("default", slo=Slo(1.0, 0.05))
    times = RequestTimes(0.0)
    times.send_prefill(0.01)
    times.end_prefill(0.1, responded=True, compute_s=0.08)
    times.send_decode(0.1, transfer_s=0.01, local_compute_s=None)
    began_s = time.process_time()
    for _ in range(requests):
        counters.get_tier(tier.name).offered += 1
        for phase in ("prefill", "decode"):
            counters.dispatches[phase, "within_slo"] += 1
            counters.legs[phase, "ok"] += 1
        counters.kv_transfers.observe(0.05)
        met = counters.record_request(tier, RequestOutcome.OK, ttft_s=0.2, tpot_s=0.02)
        parts = times.divide(0.5, first_byte_s=0.2)
        counters.record_parts(tier, RequestOutcome.OK, parts, met=met, tokens=16)
        counters.output_tokens += 16
    return (time.process_time() - began_s) / requests


def report(routers: list[BenchRouter], sampled: float, received: list[int]) -> int:
    """Print the figures; returns the exit code."""
    missed, counting_s = False, measure_counting()
    for router in routers:
        ratios, bar = router.list_ratios(routers[0], less_s=counting_s), BARS.get(router.name, 1.0)
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
        cost = router.cost_s / (routers[0].cost_s - counting_s)
        verdict = "" if router is routers[0] else f"bar {bar} × {'ok' if cost <= bar else 'MISSED'}"
        missed |= bool(verdict) and cost > bar
        print(
            f"{router.name:20} {1e6 * router.cost_s:7.1f} µs a request, {cost:.3f} × "
            f"(middle half {low:.3f} to {high:.3f}), {router.requests} requests  {verdict}"
        )
    print(f"counting, in each of them: {1e6 * counting_s:.1f} µs a request")
    print(f"sampled: {sampled:g}; {len(received)} OTLP requests, {sum(received)} bytes")
    return int(missed)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of 4.5 s (%(default)s)")
    parser.add_argument("--sampled", type=float, default=0.01, help="share of traced requests (%(default)s)")
    options = parser.parse_args()
    sys.exit(asyncio.run(run(options.rounds, options.sampled)))


if __name__ == "__main__":
    main()
