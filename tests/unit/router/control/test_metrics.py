"""Prometheus families of a router: names, labels and values, from counters and a fleet that a test fills."""

import re
import time
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fulcrum_core.values import Role, Slo
from fulcrum_router.control.metrics import build_registry
from fulcrum_router.counters import TTFT_BUCKETS_S, RequestOutcome
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.failures import LegFailed
from fulcrum_router.observe.outliers import ERROR_RATE
from fulcrum_router.policy import PairKey, PredictedTtft, TransferOutcome
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.journey import LocalPrefillReason, StopReason
from fulcrum_router.policy.tiers.tenant_counts import OTHERS
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from fulcrum_router.router import Router
from fulcrum_router.settings import Tier

TIER = Tier("gold", Slo(ttft_s=1.0, tpot_s=0.05))
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(router: Router) -> Samples:
    text = generate_latest(build_registry(router)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("fulcrum_router_")
    }


def test_requests_are_counted_by_outcome_and_tier() -> None:
    router = Router()
    counters = router.counters
    counters.get_tier("gold").offered = 4
    counters.record_request(TIER, RequestOutcome.OK, ttft_s=0.5, tpot_s=0.04)
    counters.record_request(TIER, RequestOutcome.OK, ttft_s=1.5, tpot_s=0.04)
    counters.record_request(TIER, RequestOutcome.FAILED)
    counters.record_request(TIER, RequestOutcome.INVALID)
    got = samples(router)
    gold = ("tier", "gold")
    assert {
        "ok": got["fulcrum_router_requests_total", (("outcome", "ok"), gold)],
        "failed": got["fulcrum_router_requests_total", (("outcome", "failed"), gold)],
        "offered": got["fulcrum_router_requests_offered_total", (gold,)],
        "met": got["fulcrum_router_requests_slo_met_total", (gold,)],
        "ttft count": got["fulcrum_router_ttft_seconds_count", (gold,)],
        "ttft sum": got["fulcrum_router_ttft_seconds_sum", (gold,)],
        "within 0.5 s": got["fulcrum_router_ttft_seconds_bucket", (("le", "0.5"), gold)],
    } == {"ok": 2, "failed": 1, "offered": 4, "met": 1, "ttft count": 2, "ttft sum": 2.0, "within 0.5 s": 1}


def test_the_prefill_work_that_arrives_is_counted() -> None:
    router = Router()
    for _ in range(2):
        counted = router.journeys.demand.record(tenant="", prompt_tokens=50, prefill_s=0.25)
    router.journeys.demand.withdraw(counted)
    found = samples(router)
    assert found["fulcrum_router_demand_prefill_seconds_total", ()] == 0.5
    assert found["fulcrum_router_demand_withdrawn_prefill_seconds_total", ()] == 0.25


def test_buckets_are_cumulative_and_end_in_infinity() -> None:
    router = Router()
    for value in (*TTFT_BUCKETS_S, 1e9):
        router.counters.record_request(TIER, RequestOutcome.OK, ttft_s=value, tpot_s=None)
    got = samples(router)
    counts = [
        got["fulcrum_router_ttft_seconds_bucket", (("le", bound), ("tier", "gold"))]
        for bound in (*map(str, TTFT_BUCKETS_S), "+Inf")
    ]
    assert counts == list(range(1, len(TTFT_BUCKETS_S) + 2))


def test_series_of_a_removed_instance_disappear() -> None:
    router = Router()
    for name in ("a", "b"):
        router.fleet.add(Instance(name))
    router.fleet["a"].ledger.add_prefill(tokens=5, predicted_s=1.5, now_s=time.monotonic())
    key = ("fulcrum_router_instance_prefill_queued_seconds", (("instance", "a"), ("role", "decode")))
    assert samples(router)[key] == pytest.approx(1.5, abs=0.5)
    router.fleet.keep_only(["b"])
    assert {dict(labels).get("instance") for _, labels in samples(router)} == {None, "b"}


def test_the_drift_of_an_instance_is_shown_once_it_was_measured() -> None:
    router = Router()
    for name in ("a", "b"):
        router.fleet.add(Instance(name))
    predicted_s = router.fleet["a"].prefill_model.ttft_s(1000)
    router.fleet["a"].record_prefill(tokens=1000, cached_tokens=0, computed_for_s=predicted_s / 2)
    drift = {key: value for key, value in samples(router).items() if "drift" in key[0]}
    name = "fulcrum_router_instance_prefill_drift_ratio"
    assert drift == {(name, (("instance", "a"), ("role", "decode"))): 2.0}


def test_failures_are_counted_by_reason() -> None:
    router = Router()
    router.counters.retries["prefill", "closed"] += 1
    router.counters.local_prefills[LocalPrefillReason.NO_PREFILL_INSTANCE] += 2
    router.counters.flip_requests[Role.DECODE] += 3
    router.applied_assignment.advance(7, 1.0)
    router.ttft_errors.prefill_leg.learn(predicted_s=2.0, measured_s=1.0)
    got = samples(router)
    assert {
        "retry": got["fulcrum_router_retries_total", (("phase", "prefill"), ("reason", "closed"))],
        "local": got["fulcrum_router_local_prefills_total", (("reason", "no_prefill_instance"),)],
        "flips": got["fulcrum_router_flip_requests_total", (("role", "decode"),)],
        "generation": got["fulcrum_router_assignment_generation", ()],
        "error": got["fulcrum_router_ttft_prediction_error_ratio", (("part", "prefill_leg"),)],
    } == {"retry": 1, "local": 2, "flips": 3, "generation": 7, "error": 1.0}


def test_legs_that_failed_and_stopped_requests_are_counted_by_reason() -> None:
    router = Router()
    router.fleet.add(Instance("p1"))
    for phase, failed in (
        ("prefill", LegFailed(Failure.REFUSED, "no listener")),
        ("prefill", LegFailed(Failure.STATUS, "busy", status=503)),
        ("decode", LegFailed(Failure.CLOSED, "end of stream")),
    ):
        router.record_leg_failure(router.fleet["p1"], phase, failed)
    router.counters.stopped_requests[StopReason.QUERY_OF_DEATH] += 2
    prefill, decode = ("phase", "prefill"), ("phase", "decode")
    families = {f"fulcrum_router_{name}_total" for name in ("legs", "leg_failures", "stopped_requests")}
    assert {key: value for key, value in samples(router).items() if key[0] in families} == {
        ("fulcrum_router_legs_total", (("outcome", "refused"), prefill)): 1,
        ("fulcrum_router_legs_total", (("outcome", "status"), prefill)): 1,
        ("fulcrum_router_legs_total", (("outcome", "closed"), decode)): 1,
        ("fulcrum_router_leg_failures_total", (("cause", "network"), prefill)): 1,
        ("fulcrum_router_leg_failures_total", (("cause", "load"), prefill)): 1,
        ("fulcrum_router_leg_failures_total", (("cause", "engine"), decode)): 1,
        ("fulcrum_router_stopped_requests_total", (("reason", "query_of_death"),)): 2,
    }


def test_ejections_are_counted_by_reason_and_apart_from_those_left_out() -> None:
    router = Router()
    for name in ("p1", "p2", "p3", "p4"):
        instance = Instance(name)
        instance.set_endpoint("127.0.0.1", 1)
        instance.assign(Role.PREFILL)
        router.fleet.add(instance)
    router.record_leg_failure(router.fleet["p1"], "prefill", LegFailed(Failure.REFUSED, "no listener"))
    for name in ("p2", "p3"):  # half of the instances are ejected after the first of them
        if router.fleet.eject_by_judgement(router.fleet[name], ERROR_RATE, now_s=time.monotonic()):
            router.record_ejection(router.fleet[name], ERROR_RATE)
    got = {key: value for key, value in samples(router).items() if "eject" in key[0] and value}
    role = ("role", "prefill")
    assert got == {
        ("fulcrum_router_ejections_total", (("reason", "refused"),)): 1,
        ("fulcrum_router_ejections_total", (("reason", "error_rate"),)): 1,
        ("fulcrum_router_ejections_withheld_total", (("reason", "error_rate"),)): 1,
        ("fulcrum_router_instance_ejected", (("instance", "p1"), role)): 1,
        ("fulcrum_router_instance_ejected", (("instance", "p2"), role)): 1,
    }


def test_the_error_of_the_predicted_ttft_is_shown_for_each_part() -> None:
    router = Router()
    predicted = PredictedTtft(0.5, 1.0, 1.0, 0.25, 0.25)
    router.ttft_errors.learn_prefill_leg(predicted, measured_s=4.0)
    router.ttft_errors.learn_first_token(predicted, decode_leg_s=0.25, ttft_s=2.0)
    got = {key: value for key, value in samples(router).items() if "_ttft_" in key[0]}
    error, forecast = "fulcrum_router_ttft_prediction_error_ratio", "fulcrum_router_ttft_forecast"
    assert got == {
        (error, (("part", "prefill_leg"),)): -0.5,
        (error, (("part", "decode_leg"),)): 1.0,
        (error, (("part", "ttft"),)): 0.5,
        (f"{forecast}s_total", ()): 1,
        (f"{forecast}_seconds_total", (("time", "predicted"),)): 3.0,
        (f"{forecast}_seconds_total", (("time", "measured"),)): 2.0,
    }


def test_transfers_are_counted_by_pair_and_disappear_with_the_instance() -> None:
    router = Router()
    for name in ("p1", "d1"):
        router.fleet.add(Instance(name))
    for outcome in (TransferOutcome.VERIFIED, TransferOutcome.VERIFIED, TransferOutcome.RECOMPUTED):
        router.pairs[PairKey("p1", "d1")].record(outcome, now_s=0.0)

    def transfer_counts() -> dict[str, float]:
        found = {k: v for k, v in samples(router).items() if k[0] == "fulcrum_router_kv_transfers_total"}
        assert all(("prefill", "p1") in labels and ("decode", "d1") in labels for _, labels in found)
        return {dict(labels)["outcome"]: value for (_, labels), value in found.items()}

    assert transfer_counts() == {"verified": 2.0, "recomputed": 1.0, "unknown": 0.0}
    router.fleet.keep_only(["p1"])
    router.pairs.refresh(router.fleet.instances, now_s=0.0)
    assert transfer_counts() == {}


def test_pair_gauges_leave_out_what_was_not_measured() -> None:
    router = Router()
    pair, unknown = (router.pairs[PairKey("p1", name)] for name in ("d1", "d2"))
    pair.record_duration(0.25, tokens=1000, recompute_s=1.0, cold=True)
    pair.record_duration(0.04, tokens=2000, recompute_s=1.0, cold=False)
    pair.record(TransferOutcome.VERIFIED, now_s=time.monotonic() - 60.0)
    unknown.record(TransferOutcome.UNKNOWN, now_s=0.0)
    reported = {
        (name.removeprefix("fulcrum_router_kv_pair_"), dict(labels)["decode"]): value
        for (name, labels), value in samples(router).items()
        if name.startswith("fulcrum_router_kv_pair_")
    }
    assert reported == {
        ("handshake_seconds", "d1"): 0.25,
        ("seconds_per_1k_tokens", "d1"): pytest.approx(0.02),
        ("verified_age_seconds", "d1"): pytest.approx(60.0, abs=5.0),
    }


def test_the_documentation_names_existing_families() -> None:
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"fulcrum_router_\w+", page))
    families = {
        name
        for family in build_registry(Router()).collect()
        for name in (family.name, f"{family.name}_total", f"{family.name}_bucket")
    }
    assert (named - families, bool(named)) == (set(), True)


def test_the_time_of_a_request_and_its_miss_are_shown_by_part() -> None:
    router = Router()
    parts = (0.0, 2.0, 0.0, 0.25, 0.5, 0.0, 0.125, 1.0, 0.0)
    router.counters.record_parts(TIER, RequestOutcome.OK, parts, met=False, tokens=101)
    router.counters.record_parts(TIER, RequestOutcome.OK, parts, met=True, tokens=101)
    router.counters.record_parts(TIER, RequestOutcome.CANCELLED, parts, met=False, tokens=None)
    prefix = "fulcrum_router_"
    shown = {
        (name.removeprefix(prefix), dict(labels)["part"]): value
        for (name, labels), value in samples(router).items()
        if "part" in dict(labels) and value
    }
    assert shown == {
        ("request_time_seconds_total", "waiting"): 4.0,
        ("request_time_seconds_total", "prefill_queue"): 0.5,
        ("request_time_seconds_total", "prefill"): 1.0,
        ("request_time_seconds_total", "decode_queue"): 0.25,
        ("request_time_seconds_total", "decode"): 2.0,
        ("slo_misses_total", "waiting"): 1.0,
    }


def test_series_stay_as_many_while_a_thousand_instances_come_and_go() -> None:
    router = Router()

    def count_series(first: int) -> int:
        names = [f"i{number}" for number in range(first, first + 10)]
        for name in names:
            router.fleet.add(Instance(name))
        router.fleet.keep_only(names)
        router.pairs.refresh(router.fleet.instances, now_s=0.0)
        for prefill in names[:5]:
            for decode in names[5:]:
                router.pairs[PairKey(prefill, decode)].record(TransferOutcome.VERIFIED, now_s=0.0)
        return len(samples(router))

    assert len({count_series(first) for first in range(0, 1000, 10)}) == 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param('a"b\\c\xe9\x85', id="quote, backslash, bytes of another encoding"),
        pytest.param('a\nb\\n"} 1\r# HELP c', id="lines"),
        pytest.param("x" * 10_240, id="10 KB"),
    ],
)
def test_tenants_are_shown_with_any_name(name: str) -> None:
    router = Router()
    counters = router.counters
    for outcome, met in ((RequestOutcome.OK, True), (RequestOutcome.LIMITED, False)):
        counters.record_tenant(name, outcome, met=met, now_s=time.monotonic())
    counters.record_tenant(name, RequestOutcome.INVALID, met=False, now_s=time.monotonic())
    counters.record_tenant(OTHERS, RequestOutcome.OK, met=False, now_s=time.monotonic())
    found = {
        dict(labels)["tenant"]: value
        for (family, labels), value in samples(router).items()
        if family == "fulcrum_router_tenant_requests_total" and value and ("result", "missed") not in labels
    }
    assert found == {name: 1}
    assert (
        samples(router)["fulcrum_router_tenant_requests_total", (("result", "missed"), ("tenant", OTHERS))]
        == 1
    )


def test_the_reserve_of_a_tier_is_kept_while_it_sends_requests_and_else_lent() -> None:
    router = Router()
    router.journeys.tier_reserve.set_reserves(
        {"gold": Reserve(0.25), "silver": Reserve(0.5), "free": Reserve()}
    )
    router.journeys.tier_reserve.record_arrival("gold", time.monotonic())
    assert {
        tuple(value for _, value in labels): value
        for (name, labels), value in samples(router).items()
        if name == "fulcrum_router_tier_reserve_ratio"
    } == {
        ("kept", "gold"): 0.25, ("lent", "gold"): 0.0, ("kept", "silver"): 0.0, ("lent", "silver"): 0.5,
    }  # fmt: skip
