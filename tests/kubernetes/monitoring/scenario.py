"""A local service of three tiers under load, flips and kills, scraped by a real Prometheus.

The test runs it for some seconds, `bench/dashboards.py` for two minutes.
"""

import asyncio
import json
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from fulcrum_cli.assignment.writes import flip_instance
from fulcrum_cli.local.engines import find_free_ports
from fulcrum_cli.local.program_commands import ProgramCommands, router_command
from fulcrum_cli.local.run import LocalRun, LocalRunOptions, run_local
from fulcrum_cluster.clock import SystemClock
from fulcrum_core.api import PDAssignment, PDInstance, PDService, Resource
from fulcrum_core.api.manifest import load_manifest
from fulcrum_core.values import Role, Slo
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.metrics import ApiCallCollector, Metrics
from fulcrum_operator.controller.service_metrics import ServiceCollector
from fulcrum_router.policy.tiers.tenant_counts import NAMED_MAX
from fulcrum_simulator.client import LoadGenerator, LoadTarget
from fulcrum_simulator.workload import WorkloadRequest
from tests.kubernetes.monitoring.promtool import require_program
from tests.paths import EXAMPLES, ROOT
from tests.waiting import wait_until

RULES = ROOT / "helm" / "fulcrum" / "rules" / "fulcrum.yaml"
DASHBOARDS = sorted((ROOT / "helm" / "fulcrum" / "dashboards").glob("*.json"))
RIGHTLY_EMPTY = {
    "Local prefills": "no prefill failed",
    "Flip requests of the router": "every request may be within its SLO",
    "Flips": "every split may be right",
    "annotation Flips": "as the panel",
    "Failed background tasks": "none failed",
    "Refused callers": "the service asks for no keys",
    "Headers without effect": "every client is trusted",
}
"""Panels that may have no data in the scenario, and why."""
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
GRAFANA_VALUES = {
    "__rate_interval": "10s",
    "__range_s": "60",
    "__range": "60s",
    "namespace": "default",
    "service": "play",
    "price": "2.50",
}
"""Values of Grafana's variables, longer names first where one begins another."""
DEADLINE_S = 60.0


class PanelQuery(NamedTuple):
    """A query of a panel or an annotation, with the values that Grafana would put in."""

    dashboard: str
    panel: str
    expr: str


def list_queries() -> list[PanelQuery]:
    """List the queries of all dashboards."""
    found: list[PanelQuery] = []
    for file in DASHBOARDS:
        dashboard = json.loads(file.read_text(encoding="utf-8"))
        queries = [
            (panel["title"], query) for panel in dashboard["panels"] for query in panel.get("targets", ())
        ]
        queries += [
            (f"annotation {annotation['name']}", annotation)
            for annotation in dashboard["annotations"]["list"]
        ]
        found += [PanelQuery(file.stem, name, _put_values_in(query["expr"])) for name, query in queries]
    return found


def _put_values_in(expr: str) -> str:
    for name, value in GRAFANA_VALUES.items():
        expr = expr.replace(f"${name}", value)
    return expr


@dataclass(frozen=True, slots=True)
class PrometheusApi:
    """Queries of a Prometheus."""

    client: httpx.AsyncClient
    url: str

    async def count_series(self, expr: str, *, for_s: float = 60.0, now_s: float | None = None) -> int:
        """Number of series that a query has a value of in the `for_s` seconds before `now_s`, unix time."""
        end = time.time() if now_s is None else now_s
        params: dict[str, str | float] = {"query": expr, "start": end - for_s, "end": end, "step": 1}
        response = (await self.client.get(f"{self.url}/api/v1/query_range", params=params)).json()
        assert response["status"] == "success", f"{expr}: {response.get('error')}"
        series = response["data"]["result"]
        return sum(any(value != "NaN" for _, value in each["values"]) for each in series)

    async def query_value(self, expr: str) -> float:
        """The value of a query with one series, now."""
        response = (await self.client.get(f"{self.url}/api/v1/query", params={"query": expr})).json()
        (series,) = response["data"]["result"]
        return float(series["value"][1])

    async def find_empty_queries(self) -> list[PanelQuery]:
        """Queries without data, without those that are rightly empty."""
        counts = [(query, await self.count_series(query.expr)) for query in list_queries()]
        return [query for query, count in counts if not count and query.panel not in RIGHTLY_EMPTY]

    async def list_rule_health(self) -> list[tuple[str, str]]:
        """Name and health of each rule that was evaluated."""
        groups = (await self.client.get(f"{self.url}/api/v1/rules")).json()["data"]["groups"]
        return [(rule["name"], rule["health"]) for group in groups for rule in group["rules"]]

    async def count_own_series(self) -> tuple[int, int]:
        """Our series of the service, and the most of one instance, those of its pairs as prefill included."""
        ours = '__name__=~"fulcrum_.*",service="play"'
        of_service = await self.query_value(f'count({{{ours},instance=~".*:.*",prefill=""}})')
        of_instance = await self.query_value(f'max(count by (instance) ({{{ours},instance!~".*:.*"}}))')
        of_pairs = await self.query_value(f'max(count by (prefill) ({{{ours},prefill!=""}}))')
        return int(of_service), int(of_instance + of_pairs)


@asynccontextmanager
async def run_monitored_service(
    folder: Path, load: Iterable[WorkloadRequest], *, disturbances: int, interval_s: float
) -> AsyncIterator[PrometheusApi]:
    """Run service and Prometheus, and send the load; yields when it has ended.

    Meanwhile an instance is flipped and an engine killed, `disturbances` times, each after `interval_s`.
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
            await asyncio.gather(send_load(run, load), disturb(run, client, disturbances, interval_s))
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


@contextmanager
def run_prometheus(folder: Path, jobs: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Run Prometheus with the rules and these static targets; yields its URL."""
    (port,) = find_free_ports("127.0.0.1", 1)
    scrapes = [
        {"job_name": name, "honor_labels": True, "static_configs": targets} for name, targets in jobs.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": scrapes,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        require_program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.cors.origin=http://127\\.0\\.0\\.1:[0-9]+",
        "--log.level=warn",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.communicate()


@asynccontextmanager
async def serve_operator_metrics(run: LocalRun) -> AsyncIterator[str]:
    """Serve the metrics that a leader would have of the run's objects; yields host:port."""
    cache, metrics = ObjectCache(lambda _: None), Metrics()
    metrics.registry.register(ServiceCollector(cache, SystemClock()))
    responses = Counter[tuple[str, int]]()
    metrics.registry.register(ApiCallCollector(responses))
    metrics.leader.set(1)
    metrics.reconciles.labels("ok").inc()

    async def serve(_: web.Request) -> web.Response:
        for kind in (PDService, PDInstance):
            for obj in (await run.store.list(kind, namespace="default")).items:
                cache.put_resource(obj)
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


async def disturb(run: LocalRun, client: httpx.AsyncClient, count: int, interval_s: float) -> None:
    """`count` times: send requests of all tiers for a while, flip an instance, kill an engine in a stream."""
    for _ in range(count):
        until_s = time.monotonic() + interval_s
        while time.monotonic() < until_s:
            await send_of_each_tier(run, client)
        roles = (await run.store.get(PDAssignment, "play", namespace="default")).spec.roles
        by_role = {role: [name for name in sorted(roles) if roles[name].role is role] for role in Role}
        role, names = max(by_role.items(), key=lambda item: len(item[1]))
        await flip_instance(
            run.store, "play", names[0], role.other, namespace="default", reason="a disturbance"
        )
        body = {"model": "laptop-1b", "prompt": "word", "max_tokens": 2_000, "stream": True}
        async with client.stream("POST", f"{run.info.router_url}/v1/completions", json=body) as response:
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
    for number in range(NAMED_MAX):
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
