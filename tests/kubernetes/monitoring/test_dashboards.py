"""A real Prometheus scrapes a local service: every query of every dashboard gets data, every rule works."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from tests.conftest import RecordMeasurement
from tests.kubernetes.monitoring.promtool import require_program, run_promtool
from tests.kubernetes.monitoring.queries import (
    DASHBOARDS,
    RIGHTLY_EMPTY,
    RULES,
    PrometheusApi,
    list_queries,
    read_data,
    run_prometheus,
)
from tests.kubernetes.monitoring.scenario import run_monitored_service
from tests.paths import ROOT
from tests.waiting import wait_until

SECONDS = 120.0


@pytest.mark.timeout(400)
async def test_every_query_gets_data_and_every_rule_is_evaluated(
    tmp_path: Path, record_measurement: RecordMeasurement
) -> None:
    require_program("prometheus")
    async with run_monitored_service(tmp_path, seconds=SECONDS) as prometheus:
        data = await read_data(prometheus, for_s=SECONDS, now_s=time.time())
        for query in list_queries():  # a dashboard that was opened without a service
            await prometheus.count_series(query.expr.replace('"play"', '""'))
    record_measurement(str(data))
    assert data.list_faults() == []


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


@pytest.mark.parametrize(
    ("panel", "series", "samples"),
    [
        pytest.param(
            "GPU hours",
            {'fulcrum_operator_devices{%s,pool="a"}': "_x1381 4x59"},
            {'{pool="a"}': 4.0},
            id="GPU hours of a service that has existed for the last hour of a day",
        ),
        pytest.param(
            "Cost",
            {'fulcrum_operator_devices{%s,pool="a"}': "_x1381 4x59"},
            {'{pool="a"}': 10.0},
            id="cost of a service that has existed for the last hour of a day",
        ),
        pytest.param(
            "Roles",
            {
                'fulcrum_router_instance_serving{%s,instance="p",role="prefill"}': "1x1440",
                'fulcrum_router_instance_serving{%s,instance="d",role="decode"}': "1x1440",
                'fulcrum_router_instance_serving{%s,instance="b",role="both"}': "1x1440",
                'fulcrum_router_instance_serving{%s,instance="o",role="decode"}': "0x1440",
            },
            {'{instance="p"}': 1.0, '{instance="d"}': 2.0, '{instance="b"}': 3.0, '{instance="o"}': 0.0},
            id="role of each instance, of those that play both, too",
        ),
    ],
)
def test_a_panel_shows_the_value_that_it_names(
    panel: str, series: dict[str, str], samples: dict[str, float], tmp_path: Path
) -> None:
    (query,) = (query for query in list_queries(time_range="24h") if query.panel == panel)
    expected = [{"labels": labels, "value": value} for labels, value in samples.items()]
    selector = 'namespace="default",service="play"'
    test = {
        "interval": "1m",
        "input_series": [{"series": name % selector, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query.expr, "eval_time": "24h", "exp_samples": expected}],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    code, output = run_promtool("test", "rules", str(file))
    assert code == 0, output


def test_no_query_depends_on_the_clock_of_prometheus() -> None:
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    exprs = [rule["expr"] for group in rules for rule in group["rules"]]
    exprs += [query.expr for query in list_queries()]
    assert [expr for expr in exprs if re.search(r"\b(time|timestamp)\s*\(", expr)] == []


def test_the_documented_filter_keeps_every_series_of_engines_that_a_panel_reads() -> None:
    text = (ROOT / "docs" / "how-to" / "monitoring.md").read_text(encoding="utf-8")
    (documented,) = re.findall(r"action: keep, source_labels: \[__name__\], regex: (\S+)\}", text)
    read = {name for query in list_queries() for name in re.findall(r"vllm:\w+", query.expr)}
    assert sorted(name for name in read if not re.fullmatch(documented, name)) == []


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
