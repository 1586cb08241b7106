"""Two minutes of a local service of three tiers under load, flips and kills, scraped by a real Prometheus.

The test checks what Prometheus has then, and `bench/dashboards.py` also draws the dashboards.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from fulcrum_cli.assignment.writes import flip_instance
from fulcrum_cli.local.engines import find_free_ports
from fulcrum_cli.local.program_commands import ProgramCommands, router_command
from fulcrum_cli.local.run import LocalRun, LocalRunOptions, run_local
from fulcrum_cli.play.loads import make_load
from fulcrum_cluster.clock import SystemClock
from fulcrum_core.api import PDAssignment, PDInstance, PDService, Resource
from fulcrum_core.api.manifest import load_manifest
from fulcrum_core.values import FlipPolicy, Role, Slo
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.metrics import ApiCallCollector, Metrics
from fulcrum_operator.controller.service_metrics import ServiceCollector
from fulcrum_router.policy.tiers.tenant_counts import DEFAULT_NAMED_TENANTS
from fulcrum_simulator.client import LoadGenerator, LoadTarget
from fulcrum_simulator.workload import WorkloadRequest
from tests.kubernetes.monitoring.queries import PrometheusApi, run_prometheus
from tests.paths import EXAMPLES
from tests.waiting import wait_until

TIERS = """
apiVersion: fulcrum.dev/v1alpha1
kind: QoSTier
metadata: {name: premium}
spec:  # no request can meet this objective
  priority: 10
  slo: {ttft: 1ms, tpot: 40ms}
  sheddable: false
  reservedFraction: 0.15
  match: {tenants: [acme]}
---
apiVersion: fulcrum.dev/v1alpha1
kind: QoSTier
metadata: {name: free}
spec:
  priority: -10
  rateLimit: {tokensPerMinute: 1000}
"""
SENDERS = {"premium": "acme", "free": "globex", "unknown": "initech"}
"""Tier that whole responses and streams are asked for, with the tenant that asks."""
DEADLINE_S = 60.0
DISTURBANCE_S = 15.0
"""Time before each flip and kill."""


@asynccontextmanager
async def run_monitored_service(folder: Path, *, seconds: float = 120.0) -> AsyncIterator[PrometheusApi]:
    """Run service and Prometheus, and send the load `moving` for `seconds`; yields when it has ended.

    Meanwhile instances are flipped and engines killed. After half of it the service gets policy balanced.
    """
    (metrics_port,) = find_free_ports("127.0.0.1", 1)
    commands = ProgramCommands(
        router=lambda options, ports: router_command(options, {**ports, "metrics_port": metrics_port})
    )
    labels = {"namespace": "default", "service": "play"}
    async with (
        run_local(make_service(), LocalRunOptions(port=0), commands=commands) as run,
        serve_operator_metrics(run) as operator,
        httpx.AsyncClient(trust_env=False, timeout=20.0) as client,
    ):
        instances = await run.wait_serving()
        jobs: dict[str, list[dict[str, Any]]] = {
            "router": [{"targets": [f"127.0.0.1:{metrics_port}"], "labels": labels}],
            "autoscaler": [{"targets": [run.info.autoscaler_url.removeprefix("http://")]}],
            "operator": [{"targets": [operator], "labels": {"namespace": "fulcrum-system"}}],
            "engines": list_engine_targets(instances),
        }
        with run_prometheus(folder, jobs) as url:
            prometheus = PrometheusApi(client, url)

            async def has_scraped() -> bool:  # rates count from the first sample of a series on
                with suppress(httpx.ConnectError, ValueError):  # it starts, and says so in plain text
                    tiers = await prometheus.count_series("fulcrum_router_response_seconds_count")
                    return tiers == len(SENDERS)
                return False

            await send_of_each_tier(run, client)
            await send_of_many_tenants(run, client)
            await wait_until(has_scraped, "Prometheus has scraped the router", interval_s=0.2)
            load = make_load("moving", duration_s=seconds, seed=1)
            disturbances = max(1, int(seconds / DISTURBANCE_S))
            await asyncio.gather(send_load(run, load), disturb(run, client, disturbances))
            yield prometheus


def make_service() -> tuple[Resource, ...]:
    """The service of `fulcrum play` with three tiers, the built-in one included, and admission."""
    play, tiers = (EXAMPLES / "play.yaml").read_text(), load_manifest(TIERS, source="tiers")
    text = play.replace("  router:\n", "  qosTiers: [premium, free]\n  router:\n    admission: Enforce\n")
    return (*tiers, *load_manifest(text, source="play.yaml"))


def list_engine_targets(instances: tuple[PDInstance, ...]) -> list[dict[str, Any]]:
    """The scrape targets of the engines, labelled as the chart's PodMonitor labels them."""
    return [
        {
            "targets": [instance.status.endpoint],
            "labels": {
                "namespace": "default",
                "service": "play",
                "instance": instance.metadata.name,
                "role": (instance.status.role or "").lower(),
            },
        }
        for instance in instances
    ]


@asynccontextmanager
async def serve_operator_metrics(run: LocalRun) -> AsyncIterator[str]:
    """Serve the metrics that a leader would have of the run's objects; yields host:port."""
    cache, metrics = ObjectCache(lambda _: None), Metrics()
    metrics.registry.register(ServiceCollector(cache, SystemClock()))
    responses = Counter[tuple[str, int]]()
    metrics.registry.register(ApiCallCollector(responses))
    metrics.leader.set(1)

    async def serve(_: web.Request) -> web.Response:
        for kind in (PDService, PDInstance, PDAssignment):
            for obj in (await run.store.list(kind, namespace="default")).items:
                cache.put_resource(obj)
        metrics.reconciles.labels("ok").inc()
        metrics.reconcile_seconds.observe(0.01)
        metrics.drain_seconds.observe(3.0)
        responses["GET", 200] += 1
        return web.Response(
            body=generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.add_routes([web.get("/metrics", serve)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield "{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


async def disturb(run: LocalRun, client: httpx.AsyncClient, count: int) -> None:
    """`count` times: send requests of all tiers for a while, flip an instance, kill an engine in a stream."""
    for number in range(count):
        if number == count // 2:
            change = {"spec": {"autoscaling": {"policy": FlipPolicy.BALANCED}}}
            await run.store.patch(PDService, "play", change, namespace="default")
        until_s = time.monotonic() + DISTURBANCE_S
        while time.monotonic() < until_s:
            await send_of_each_tier(run, client)
        roles = (await run.store.get(PDAssignment, "play", namespace="default")).spec.roles
        by_role = {role: [name for name in sorted(roles) if roles[name].role is role] for role in Role}
        role, names = max(by_role.items(), key=lambda item: len(item[1]))
        await flip_instance(
            run.store, "play", names[0], role.other, namespace="default", reason="a disturbance"
        )
        await kill_an_engine(run, client)


async def kill_an_engine(run: LocalRun, client: httpx.AsyncClient) -> None:
    """Kill the decode engine of a stream; one that admission refuses is sent again."""
    body = {"model": "laptop-1b", "prompt": "word", "max_tokens": 2_000, "stream": True}
    is_refused = True
    while is_refused:
        async with client.stream("POST", f"{run.info.router_url}/v1/completions", json=body) as response:
            is_refused = "x-fulcrum-refused" in response.headers
            if not is_refused:
                run.kill(response.headers["x-fulcrum-decode"])  # the head comes with the first token
            with suppress(httpx.RemoteProtocolError):  # without a seed another engine cannot go on with it
                await response.aread()


async def send_of_each_tier(run: LocalRun, client: httpx.AsyncClient) -> None:
    """Send a whole response and a stream of each tier."""
    for tier, tenant in SENDERS.items():
        headers = {"x-customer-tier": tier, "x-tenant-id": tenant}
        for stream in (False, True):
            body = {"model": "laptop-1b", "prompt": "word " * 200, "max_tokens": 4, "stream": stream}
            await client.post(f"{run.info.router_url}/v1/completions", json=body, headers=headers)


async def send_of_many_tenants(run: LocalRun, client: httpx.AsyncClient) -> None:
    """Send a request of each of more tenants than have a name, some of which Prometheus must escape."""
    for number in range(DEFAULT_NAMED_TENANTS):
        body = {"model": "laptop-1b", "prompt": "word", "max_tokens": 1}
        headers = {"x-tenant-id": f'tenant "{number}" \\'}
        await client.post(f"{run.info.router_url}/v1/completions", json=body, headers=headers)


async def send_load(run: LocalRun, load: Iterable[WorkloadRequest]) -> None:
    """Send streams to the service, each at its time."""
    host, port = run.info.router_url.removeprefix("http://").split(":")
    target = LoadTarget(host=host, port=int(port), model="laptop-1b", chat_share=0.5)
    generator = LoadGenerator(target, slo=Slo(60.0, 60.0), seed=1)
    await generator.send(load)
    await generator.finish(timeout_s=DEADLINE_S)
