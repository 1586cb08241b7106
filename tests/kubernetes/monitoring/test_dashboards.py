"""A real Prometheus scrapes a local service: every query of every dashboard gets data, every rule works."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from fulcrum_simulator.workload import WorkloadRequest
from tests.conftest import RecordMeasurement
from tests.kubernetes.monitoring.promtool import require_program
from tests.kubernetes.monitoring.scenario import (
    DASHBOARDS,
    DEADLINE_S,
    RIGHTLY_EMPTY,
    PanelQuery,
    list_queries,
    run_monitored_service,
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
