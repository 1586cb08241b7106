"""The queries of dashboards and rules, a real Prometheus that answers them, and what the answers must be."""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from fulcrum_cli.local.engines import find_free_ports
from tests.kubernetes.monitoring.promtool import require_program
from tests.paths import ROOT

RULES = ROOT / "helm" / "fulcrum" / "rules" / "fulcrum.yaml"
DASHBOARDS = sorted((ROOT / "helm" / "fulcrum" / "dashboards").glob("*.json"))
RIGHTLY_EMPTY = {
    "Local prefills": "no prefill failed",
    "Flip requests of the router": "every request may be within its SLO",
    "Flips": "every split may be right",
    "annotation Flips": "as the panel",
    "Faults of the router": "no background task and no TLS handshake failed",
    "Keys, headers and tiers that are not valid": "the service asks for no keys, and trusts every client",
}
"""Panels that may have no data in the scenario, and why."""
GRAFANA_VALUES = {
    "__rate_interval": "10s",
    "namespace": "default",
    "service": "play",
    "price": "2.50",
    "tier": ".*",
    "instance": ".*",
}
"""Values of Grafana's variables but the time range, longer names first where one begins another."""
SERIES_MAX, SERIES_OF_INSTANCE_MAX = 400, 150
"""Most of our series of one service, and of one of its instances."""


class PanelQuery(NamedTuple):
    """A query of a panel or an annotation, with the values that Grafana would put in."""

    dashboard: str
    panel: str
    expr: str


def list_queries(*, time_range: str = "60s") -> list[PanelQuery]:
    """List the queries of all dashboards, with `time_range` for the range that a person chose."""
    values = {"__range": time_range, **GRAFANA_VALUES}
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
        found += [
            PanelQuery(file.stem, name, _put_values_in(query["expr"], values)) for name, query in queries
        ]
    return found


def _put_values_in(expr: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
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


@dataclass(frozen=True, slots=True)
class DashboardData:
    """What Prometheus has for dashboards and rules in a time range."""

    counts: dict[PanelQuery, int]
    """Series with data of each query."""
    rules: list[tuple[str, str]]
    """Name and health of each rule."""
    of_service: int
    of_instance: int

    def list_faults(self) -> list[str]:
        """Queries without data, rules that fail, and too many series."""
        empty = [query.panel for query, count in self.counts.items() if not count]
        faults = [f"no data: {panel}" for panel in empty if panel not in RIGHTLY_EMPTY]
        faults += [f"rule {name}: {health}" for name, health in self.rules if health != "ok"]
        if not self.rules:
            faults.append("no rules")
        if self.of_service > SERIES_MAX or self.of_instance > SERIES_OF_INSTANCE_MAX:
            faults.append(f"too many series: {self.of_service}, {self.of_instance}")
        return faults

    def __str__(self) -> str:
        empty = sorted({query.panel for query, count in self.counts.items() if not count})
        filled = sum(map(bool, self.counts.values()))
        sound = sum(health == "ok" for _, health in self.rules)
        return (
            f"{filled} of {len(self.counts)} queries of {len(DASHBOARDS)} dashboards and recorded series "
            f"have data (without: {', '.join(empty) or 'none'}); {sound} of {len(self.rules)} rules work; "
            f"series of the service: {self.of_service} (bar {SERIES_MAX}), of one instance: "
            f"{self.of_instance} (bar {SERIES_OF_INSTANCE_MAX})"
        )


async def read_data(prometheus: PrometheusApi, *, for_s: float, now_s: float) -> DashboardData:
    """Ask for all panels and recorded series in the `for_s` seconds before `now_s`, unix time."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    names = [rule["record"] for group in rules for rule in group["rules"] if "record" in rule]
    queries = [*list_queries(), *(PanelQuery("rules", name, name) for name in names)]
    counts = {query: await prometheus.count_series(query.expr, for_s=for_s, now_s=now_s) for query in queries}
    return DashboardData(counts, await prometheus.list_rule_health(), *await prometheus.count_own_series())


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
