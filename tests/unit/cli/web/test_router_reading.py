"""The router's metrics are read into figures, and two readings give rates, latencies and attainment."""

from collections import Counter

import pytest

from fulcrum_cli.web.reading_window import (
    Latency,
    ReadingWindow,
    RecentTraffic,
    TierAttainment,
    percentile_s,
)
from fulcrum_cli.web.router_reading import InstanceLoad, RouterReading, TierCounts, parse_reading
from fulcrum_core.values import Role

EXPOSITION = """# TYPE fulcrum_router_instance_serving gauge
fulcrum_router_instance_serving{instance="a",role="prefill"} 1.0
fulcrum_router_instance_prefill_queued_seconds{instance="a",role="prefill"} 0.25
fulcrum_router_instance_prefill_legs{instance="a",role="prefill"} 2.0
fulcrum_router_instance_kv_usage_ratio{instance="a",role="prefill"} NaN
fulcrum_router_instance_decode_tokens{instance="b",role="decode"} 1200.0
fulcrum_router_instance_decode_legs{instance="b",role="decode"} 3.0
fulcrum_router_instance_kv_usage_ratio{instance="b",role="decode"} 0.5
fulcrum_router_instance_missed_probes{instance="b",role="decode"} 2.0
fulcrum_router_instance_ejected{instance="b",role="decode"} 1.0
fulcrum_router_requests_offered_total{tier="gold"} 12.0
fulcrum_router_requests_total{outcome="ok",tier="gold"} 8.0
fulcrum_router_requests_total{outcome="cancelled",tier="gold"} 3.0
fulcrum_router_requests_total{outcome="broken",tier="gold"} 1.0
fulcrum_router_requests_slo_met_total{tier="gold"} 7.0
fulcrum_router_ttft_seconds_bucket{le="0.5",tier="gold"} 4.0
fulcrum_router_ttft_seconds_bucket{le="0.5",tier="free"} 1.0
fulcrum_router_ttft_seconds_bucket{le="+Inf",tier="gold"} 8.0
fulcrum_router_kv_transfers_total{decode="b",outcome="verified",prefill="a"} 5.0
fulcrum_router_kv_transfers_total{decode="b",outcome="unknown",prefill="a"} 1.0
fulcrum_router_local_prefills_total{reason="no_prefill"} 2.0
fulcrum_router_output_tokens_total 900.0
fulcrum_router_waiting_requests 4.0
fulcrum_router_assignment_generation 7.0
fulcrum_router_active 1.0
fulcrum_router_requests_offered_total{tier="spoilt"} much
fulcrum_router_unknown_tiers_total 1.0
"""


def test_the_families_of_the_page_are_read_and_all_others_skipped() -> None:
    assert parse_reading(EXPOSITION, at_s=10.0) == RouterReading(
        at_s=10.0,
        instances={
            "a": InstanceLoad(role=Role.PREFILL, serving=True, prefill_queued_s=0.25, prefill_legs=2),
            "b": InstanceLoad(
                role=Role.DECODE,
                decode_legs=3,
                decode_tokens=1200,
                kv_usage=0.5,
                missed_probes=2,
                ejected=True,
            ),
        },
        tiers={"gold": TierCounts(offered=12.0, scored=9.0, met=7.0)},
        transfers=Counter({("a", "b"): 6}),
        ttft={0.5: 5.0, float("inf"): 8.0},
        local_prefills=2.0,
        output_tokens=900.0,
        waiting=4,
        generation=7,
        active=True,
    )


@pytest.mark.parametrize("text", ["", "\n\n", "<html>not metrics</html>", "fulcrum_router_active"])
def test_text_that_is_not_metrics_is_an_empty_reading(text: str) -> None:
    assert parse_reading(text, at_s=1.0) == RouterReading(1.0)


@pytest.mark.parametrize(
    "line",
    [
        "fulcrum_router_waiting_requests +Inf",
        'fulcrum_router_instance_prefill_legs{instance="a"} NaN',
        "fulcrum_router_ttft_seconds_bucket 1.0",
        'fulcrum_router_tpot_seconds_bucket{le="soon"} 1.0',
    ],
)
def test_a_line_that_no_router_writes_is_skipped(line: str) -> None:
    assert parse_reading(f"{line}\n", at_s=1.0) == RouterReading(1.0)


def test_label_values_with_quotes_braces_and_10_kb_are_read() -> None:
    name = "x" * 10_000 + r"\"}{\n"
    reading = parse_reading(f'fulcrum_router_requests_offered_total{{tier="{name}"}} 3.0\n', at_s=0.0)
    assert reading.tiers == {name: TierCounts(offered=3.0)}


def reading(at_s: float, *, served: float, met: float = 0.0) -> RouterReading:
    return RouterReading(
        at_s,
        tiers={"gold": TierCounts(offered=served + 1, scored=served, met=met)},
        transfers=Counter({("a", "b"): int(served)}),
        ttft={0.5: served / 2, 1.0: served, float("inf"): served},
        output_tokens=served * 10,
    )


def test_two_readings_give_rates_latencies_and_attainment() -> None:
    window = ReadingWindow()
    window.add(reading(0.0, served=100.0, met=100.0))
    window.add(reading(2.0, served=120.0, met=115.0))
    assert window.traffic() == RecentTraffic(
        offered_rps=10.0,
        output_tokens_rps=100.0,
        local_prefill_rps=0.0,
        transfer_rps={("a", "b"): 10.0},
        ttft=Latency(0.5, 0.99),
        tpot=Latency(None, None),
        attained=0.75,
        tiers=(TierAttainment("gold", 0.75, 10.0),),
    )


def test_one_reading_gives_no_traffic() -> None:
    window = ReadingWindow()
    assert window.traffic() == RecentTraffic()
    window.add(reading(0.0, served=5.0))
    assert window.traffic() == RecentTraffic()


def test_rates_count_from_the_last_seconds_and_latencies_from_the_window() -> None:
    window = ReadingWindow()
    for second in range(30):
        window.add(reading(float(second), served=100.0 if second < 20 else 100.0 + 50 * (second - 19)))
    assert window.traffic().offered_rps == 50.0
    assert window.traffic().attained == 0.0


def test_a_restarted_router_begins_a_new_window() -> None:
    window = ReadingWindow()
    window.add(reading(0.0, served=100.0))
    window.add(reading(1.0, served=3.0))
    assert window.traffic() == RecentTraffic()


@pytest.mark.parametrize(
    ("buckets", "percent", "expected"),
    [
        ({}, 99, None),
        ({1.0: 0.0, float("inf"): 0.0}, 99, None),
        ({1.0: 50.0, 2.0: 100.0, float("inf"): 100.0}, 50, 1.0),
        ({1.0: 50.0, 2.0: 100.0, float("inf"): 100.0}, 75, 1.5),
        ({1.0: 50.0, float("inf"): 100.0}, 99, 1.0),
        ({1.0: 0.0, 2.0: 10.0, float("inf"): 10.0}, 50, 1.5),
    ],
    ids=[
        "no buckets",
        "no count",
        "at an edge",
        "between edges",
        "above the last edge",
        "empty first bucket",
    ],
)
def test_percentiles_are_interpolated_as_prometheus_does(
    buckets: dict[float, float], percent: float, expected: float | None
) -> None:
    assert percentile_s(buckets, percent) == expected
