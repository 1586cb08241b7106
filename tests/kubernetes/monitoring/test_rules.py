"""promtool finds no fault in metrics and rules; each alert fires in one case and is silent in another."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from fulcrum_autoscaler.metrics import AutoscalerMetrics, ServiceMetrics
from fulcrum_operator.controller.metrics import Metrics
from fulcrum_router.control.metrics import build_registry
from fulcrum_router.counters import RequestOutcome
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy import PairKey, TransferOutcome
from fulcrum_router.router import Router
from tests.kubernetes.monitoring.promtool import run_promtool
from tests.paths import ROOT

RULES = ROOT / "helm" / "fulcrum" / "rules" / "fulcrum.yaml"
SERVICE = 'namespace="a",service="chat"'
HOURS = 7
"""Minutes of input are 60 times this, enough for the longest window."""


def make_router_registry() -> CollectorRegistry:
    """A router with a series of each family."""
    router = Router()
    router.counters.get_tier("gold").requests_by_outcome[RequestOutcome.OK] = 1
    router.counters.legs["prefill", "ok"] += 1
    router.fleet.add(Instance("p1"))
    router.pairs[PairKey("p1", "d1")].record(TransferOutcome.VERIFIED, now_s=0.0)
    return build_registry(router)


def make_autoscaler_registry() -> CollectorRegistry:
    metrics = AutoscalerMetrics()
    ServiceMetrics(metrics, namespace="a", service="chat")
    return metrics.registry


@pytest.mark.parametrize(
    "registry",
    [
        pytest.param(make_router_registry, id="router"),
        pytest.param(make_autoscaler_registry, id="autoscaler"),
        pytest.param(lambda: Metrics().registry, id="operator"),
    ],
)
def test_promtool_finds_nothing_wrong_with_the_metrics(registry: Any) -> None:
    assert run_promtool("check", "metrics", stdin=generate_latest(registry()).decode()) == (0, "")


def test_no_metric_depends_on_the_clocks_of_other_machines() -> None:
    """Prometheus gives each sample its own time, and no value is a time, so skew changes nothing."""
    registries = (make_router_registry(), make_autoscaler_registry(), Metrics().registry)
    samples = [sample for each in registries for family in each.collect() for sample in family.samples]
    ours = [sample for sample in samples if sample.name.startswith("fulcrum_")]
    year_2001 = 1e9
    assert [s.name for s in ours if s.timestamp is not None or s.value > year_2001] == []
    assert [s.name for s in ours if s.name.endswith(("_created", "_timestamp_seconds"))] == []


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    code, output = run_promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert (code, "SUCCESS" in output) == (0, True), output


class Case(NamedTuple):
    """Input series by which an alert fires at the end, and others by which it stays silent."""

    fires: dict[str, str]
    silent: dict[str, str]


def count(per_minute: float) -> str:
    return f"0+{per_minute}x{HOURS * 60}"


def always(value: float) -> str:
    return f"{value}x{HOURS * 60}"


def late(before: float, after: float) -> str:
    """`before`, and `after` in the last 20 seconds."""
    return f"{before}x{HOURS * 60 - 1} {after}"


def requests(*, missed_of_100: float, per_minute: float = 100) -> dict[str, str]:
    return {
        f'fulcrum_router_requests_offered_total{{{SERVICE},tier="t"}}': count(per_minute),
        f'fulcrum_router_requests_total{{{SERVICE},tier="t",outcome="ok"}}': count(per_minute),
        f'fulcrum_router_requests_slo_met_total{{{SERVICE},tier="t"}}': count(
            per_minute * (1 - missed_of_100 / 100)
        ),
        f"fulcrum_router_active{{{SERVICE}}}": always(1),
    }


def overflow(tokens_of_100: float) -> dict[str, str]:
    return {
        f"fulcrum_router_prompt_tokens_sent_total{{{SERVICE}}}": count(6_000),
        f"fulcrum_router_overflow_prompt_tokens_total{{{SERVICE}}}": count(60 * tokens_of_100),
    }


def condition(type_: str, reason: str, value: int = 1, *, values: str = "") -> dict[str, str]:
    """A condition with this reason, always or with these `values`."""
    series = f'fulcrum_operator_service_condition{{{SERVICE},condition="{type_}",reason="{reason}"}}'
    return {series: values or always(value)}


def gauge(name: str, fires: float, silent: float, labels: str = "") -> Case:
    series = f"{name}{{{SERVICE}{labels}}}"
    return Case({series: always(fires)}, {series: always(silent)})


def counter(name: str, fires: float, silent: float, labels: str = "") -> Case:
    series = f"{name}{{{SERVICE}{labels}}}"
    return Case({series: count(fires)}, {series: count(silent)})


def flips(to_prefill: float, to_decode: float) -> dict[str, str]:
    return {
        f'fulcrum_autoscaler_flips_total{{{SERVICE},to="prefill"}}': count(to_prefill / 30),
        f'fulcrum_autoscaler_flips_total{{{SERVICE},to="decode"}}': count(to_decode / 30),
    }


def predictions(error: float, per_minute: float) -> dict[str, str]:
    return {
        f'fulcrum_router_ttft_prediction_error_ratio{{{SERVICE},part="ttft"}}': always(error),
        f'fulcrum_router_requests_offered_total{{{SERVICE},tier="t"}}': count(per_minute),
    }


def generations(operator: float, router: float) -> dict[str, str]:
    return {
        f"fulcrum_operator_assignment_generation{{{SERVICE}}}": always(operator),
        f"fulcrum_router_assignment_generation{{{SERVICE}}}": always(router),
    }


def two_generations(operator: float, *, active: float, standby: float) -> dict[str, str]:
    return {
        f"fulcrum_operator_assignment_generation{{{SERVICE}}}": always(operator),
        f'fulcrum_router_assignment_generation{{{SERVICE},pod="active"}}': always(active),
        f'fulcrum_router_assignment_generation{{{SERVICE},pod="standby"}}': always(standby),
    }


def serving(*, before: float, after: float, minutes: int) -> dict[str, str]:
    """Serving decode instances: `before` since the router began, `after` in the last minutes."""
    series = f'fulcrum_router_serving_instances{{{SERVICE},role="decode"}}'
    return {series: f"{before}x{HOURS * 60 - minutes} {after}x{minutes - 1}"}


def starting(minutes: int) -> dict[str, str]:
    """A service that has existed for some minutes, and whose engines have not begun to serve."""
    series = f'fulcrum_router_serving_instances{{{SERVICE},role="decode"}}'
    return {series: f"_x{HOURS * 60 - minutes} 0x{minutes}"}


def objective(share: float) -> dict[str, str]:
    return {f"fulcrum_operator_slo_objective_ratio{{{SERVICE}}}": always(share)}


CASES = {
    "FulcrumSLOBurnsFast": Case(requests(missed_of_100=20), requests(missed_of_100=10)),
    "FulcrumSLOBurnsSlowly": Case(requests(missed_of_100=8), requests(missed_of_100=5)),
    "FulcrumRoleNotServed": Case(
        serving(before=1, after=0, minutes=5), serving(before=1, after=1, minutes=5)
    ),
    "FulcrumNoActiveRouter": gauge("fulcrum_router_active", 0, 1),
    "FulcrumRouterFailover": Case(
        {f"fulcrum_router_takeovers_total{{{SERVICE}}}": late(0, 1)},
        {f"fulcrum_router_takeovers_total{{{SERVICE}}}": always(1)},
    ),
    "FulcrumKVTransferNotVerified": Case(
        condition("KVTransferVerified", "Recomputed", 0), condition("KVTransferVerified", "NoTrafficYet", -1)
    ),
    "FulcrumGPUsMissing": Case(
        condition("Degraded", "Unschedulable", 1), condition("Degraded", "NodeLost", 1)
    ),
    "FulcrumCPUPrefill": Case(overflow(6), overflow(4)),
    "FulcrumWatchStale": Case(generations(7, 6), generations(7, 7)),
    "FulcrumServiceDegraded": Case(
        condition("Degraded", "NodeLost", 1), condition("Degraded", "AsExpected", 0)
    ),
    "FulcrumRolloutStuck": Case(
        condition("Progressing", "RolloutProgressing", 1), condition("Progressing", "InstancesChanging", 1)
    ),
    "FulcrumDrainStuck": gauge("fulcrum_operator_longest_phase_seconds", 1900, 1700, ',phase="Draining"'),
    "FulcrumInstanceEjected": gauge("fulcrum_router_instance_ejected", 1, 0, ',instance="chat-0"'),
    "FulcrumWaitingRoomFull": counter("fulcrum_router_stopped_requests_total", 6, 0, ',reason="full"'),
    "FulcrumFlapping": Case(
        flips(6, 6) | requests(missed_of_100=5), flips(12, 0) | requests(missed_of_100=5)
    ),
    "FulcrumPredictionsOff": Case(predictions(-0.8, 60), predictions(0.8, 0)),
    "FulcrumAutoscalerBlind": gauge("fulcrum_autoscaler_router_state_age_seconds", 90, 2),
    "FulcrumOperatorWithoutLeader": Case(
        {'fulcrum_operator_leader{namespace="f",pod="a"}': always(0)},
        {
            'fulcrum_operator_leader{namespace="f",pod="a"}': always(0),
            'fulcrum_operator_leader{namespace="f",pod="b"}': always(1),
        },
    ),
    "FulcrumReconcilesFail": Case(
        {'fulcrum_operator_reconciles_total{namespace="f",outcome="error"}': count(6)},
        {'fulcrum_operator_reconciles_total{namespace="f",outcome="ok"}': count(6)},
    ),
}

MORE_CASES = {
    "engines of a new service still load their model": (
        "FulcrumRoleNotServed",
        Case(starting(60), starting(30)),
    ),
    "the router of a new service still starts": (
        "FulcrumNoActiveRouter",
        Case(
            {f"fulcrum_router_active{{{SERVICE}}}": f"1x{HOURS * 60 - 5} 0x4"},
            condition("Ready", "RouterStarting", values=f"_x{HOURS * 60 - 3} 0x3"),
        ),
    ),
    "the autoscaler does not run": (
        "FulcrumAutoscalerBlind",
        Case(
            condition("Ready", "InstancesServing", 1),
            condition("Ready", "InstancesServing", 1)
            | {f"fulcrum_autoscaler_router_state_age_seconds{{{SERVICE}}}": always(2)},
        ),
    ),
    "missing GPUs have an alert of their own": (
        "FulcrumServiceDegraded",
        Case(condition("Degraded", "NodeLost", 1), condition("Degraded", "Unschedulable", 1)),
    ),
    "the worst cause of a degraded service changes again and again": (
        "FulcrumServiceDegraded",
        Case(
            condition("Degraded", "NodeLost", values="1 stale " * (HOURS * 30) + "1")
            | condition("Degraded", "EngineStartFailed", values="_ 1 " + "stale 1 " * (HOURS * 30 - 1)),
            condition("Degraded", "AsExpected", 0),
        ),
    ),
    "only the standby uses an old assignment": (
        "FulcrumWatchStale",
        Case(two_generations(7, active=7, standby=6), two_generations(7, active=7, standby=7)),
    ),
    "roles follow a load that moves, and the SLO is met": (
        "FulcrumFlapping",
        Case(flips(6, 6) | requests(missed_of_100=5), flips(6, 6) | requests(missed_of_100=0.5)),
    ),
    "all requests miss an objective of 90 %, whose budget cannot burn 14.4 times too fast": (
        "FulcrumSLOBurnsFast",
        Case(objective(0.9) | requests(missed_of_100=100), objective(0.9) | requests(missed_of_100=50)),
    ),
    "all requests miss an objective of 80 %, whose budget cannot burn 6 times too fast": (
        "FulcrumSLOBurnsSlowly",
        Case(objective(0.8) | requests(missed_of_100=100), objective(0.8) | requests(missed_of_100=50)),
    ),
    "no pod of a router runs": (
        "FulcrumNoActiveRouter",
        Case(
            condition("Ready", "NoRouter", 0),
            condition("Ready", "InstancesServing", 1)
            | {
                f'fulcrum_router_active{{{SERVICE},pod="a"}}': always(1),
                f'fulcrum_router_active{{{SERVICE},pod="b"}}': always(0),
            },
        ),
    ),
    "only the standby has read the last assignment": (
        "FulcrumWatchStale",
        Case(two_generations(7, active=6, standby=7), two_generations(7, active=7, standby=7)),
    ),
}
"""Further cases of alerts, by what happens in them."""


def list_alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_each_alert_has_two_cases() -> None:
    assert sorted(CASES) == sorted(alert["alert"] for alert in list_alerts())


@pytest.mark.parametrize(
    ("alert", "case"),
    [
        *(pytest.param(alert, case, id=alert) for alert, case in CASES.items()),
        *(pytest.param(*case, id=name) for name, case in MORE_CASES.items()),
    ],
)
def test_an_alert_fires_in_its_first_case_and_is_silent_in_the_second(
    alert: str, case: Case, tmp_path: Path
) -> None:
    query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [{"expr": query, "eval_time": f"{HOURS}h", "exp_samples": expected}],
        }
        for series, expected in (
            (case.fires, [{"labels": "{}", "value": 1}]),
            (case.silent, []),
        )
    ]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    code, output = run_promtool("test", "rules", str(file))
    assert code == 0, output
