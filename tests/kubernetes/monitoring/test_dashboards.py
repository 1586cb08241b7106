"""A real Prometheus scrapes a local service: every query of every dashboard gets data, every rule works."""

import json
import re
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from fulcrum_simulator.workload import WorkloadRequest
from tests.conftest import RecordMeasurement
from tests.kubernetes.monitoring.promtool import require_program
from tests.kubernetes.monitoring.scenario import (
    DASHBOARDS,
    DEADLINE_S,
    RIGHTLY_EMPTY,
    RULES,
    PanelQuery,
    PrometheusApi,
    list_queries,
    run_monitored_service,
    run_prometheus,
)
from tests.waiting import wait_until

REQUESTS, REQUESTS_PER_S = 120, 8
SERIES_MAX, SERIES_OF_INSTANCE_MAX = 400, 150


async def test_every_query_gets_data_and_every_rule_is_evaluated(
    tmp_path: Path, record_measurement: RecordMeasurement
) -> None:
    require_program("prometheus")
    load = [WorkloadRequest(number / REQUESTS_PER_S, 200, 20) for number in range(REQUESTS)]
    async with run_monitored_service(tmp_path, load, disturbances=1, interval_s=5.0) as prometheus:
        empty: list[PanelQuery] = []

        async def has_data() -> bool:
            empty[:] = await prometheus.find_empty_queries()
            return not empty

        with suppress(TimeoutError):
            await wait_until(has_data, timeout_s=DEADLINE_S, interval_s=1.0)
        for query in list_queries():  # a dashboard that was opened without a service
            await prometheus.count_series(query.expr.replace('"play"', '""'))
        health = await prometheus.list_rule_health()
        of_service, of_instance = await prometheus.count_own_series()
    record_measurement(
        f"{len(list_queries())} queries of {len(DASHBOARDS)} dashboards, {len(health)} rules; series of a "
        f"service with three tiers: {of_service}, of an instance: at most {of_instance}"
    )
    assert (empty, {state for _, state in health}) == ([], {"ok"})
    assert (of_service <= SERIES_MAX, of_instance <= SERIES_OF_INSTANCE_MAX) == (True, True)


async def test_a_prometheus_that_is_empty_or_restarts_answers_every_query(tmp_path: Path) -> None:
    require_program("prometheus")
    async with httpx.AsyncClient(trust_env=False, timeout=20.0) as client:
        for _ in range(2):
            with run_prometheus(tmp_path, {}) as url:
                prometheus = PrometheusApi(client, url)

                async def has_evaluated(prometheus: PrometheusApi = prometheus) -> bool:
                    with suppress(httpx.ConnectError, ValueError):  # it starts, and says so in plain text
                        return {state for _, state in await prometheus.list_rule_health()} == {"ok"}
                    return False

                await wait_until(has_evaluated, "all rules are evaluated", interval_s=0.2)
                answered = [query for query in list_queries() if await prometheus.count_series(query.expr)]
                assert answered == []


def test_no_query_depends_on_the_clock_of_prometheus() -> None:
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    exprs = [rule["expr"] for group in rules for rule in group["rules"]]
    exprs += [query.expr for query in list_queries()]
    assert [expr for expr in exprs if re.search(r"\b(time|timestamp)\s*\(", expr)] == []


def test_each_panel_says_what_to_do() -> None:
    panels = [panel for file in DASHBOARDS for panel in json.loads(file.read_text())["panels"]]
    shown = [panel for panel in panels if panel["type"] != "row"]
    assert [panel["title"] for panel in shown if len(panel.get("description", "")) < 20] == []


def test_no_panel_is_wider_than_its_place() -> None:
    panels = [panel for file in DASHBOARDS for panel in json.loads(file.read_text())["panels"]]
    places = {panel["title"]: panel["gridPos"] for panel in panels}
    assert [title for title, place in places.items() if place["x"] + place["w"] > 24] == []


@pytest.mark.parametrize("title", RIGHTLY_EMPTY)
def test_a_panel_that_may_be_empty_exists(title: str) -> None:
    assert title in {query.panel for query in list_queries()}
