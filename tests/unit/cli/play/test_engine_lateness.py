"""Step lateness is parsed from metrics, merged over engines and restarts, and read as a percentile."""

import math

import pytest

from fulcrum_cli.play.engine_lateness import EngineLateness, parse_buckets, percentile_edge_s

EXPOSITION = """# TYPE fulcrum_engine_step_lateness_seconds histogram
fulcrum_engine_step_lateness_seconds_bucket{model_name="m",le="0.001"} 90.0
fulcrum_engine_step_lateness_seconds_bucket{model_name="m",le="0.01"} 99.0
fulcrum_engine_step_lateness_seconds_bucket{model_name="m",le="+Inf"} 100.0
fulcrum_engine_step_lateness_seconds_sum{model_name="m"} 0.5
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""


def test_the_histogram_is_read_from_an_engines_metrics() -> None:
    assert parse_buckets(EXPOSITION) == {0.001: 90.0, 0.01: 99.0, math.inf: 100.0}


@pytest.mark.parametrize(("percent", "edge"), [(50, 0.001), (90, 0.001), (99, 0.01)])
def test_a_percentile_is_the_upper_edge_of_its_bucket(percent: float, edge: float) -> None:
    assert percentile_edge_s({0.001: 90.0, 0.01: 99.0, math.inf: 100.0}, percent) == edge


def test_a_percentile_above_all_finite_edges_is_the_largest_of_them() -> None:
    assert percentile_edge_s({0.001: 90.0, 0.01: 99.0, math.inf: 100.0}, 100) == 0.01


def test_lateness_without_samples_is_unknown() -> None:
    assert percentile_edge_s({}, 99) is None
    assert EngineLateness().p99_ms() is None


def test_samples_of_a_restarted_engine_are_kept() -> None:
    lateness = EngineLateness()
    lateness.record("a", {0.001: 0.0, 0.01: 100.0, math.inf: 100.0})
    lateness.record("a", {0.001: 10.0, 0.01: 10.0, math.inf: 10.0})
    lateness.record("b", {0.001: 5.0, 0.01: 5.0, math.inf: 5.0})
    assert lateness.p99_ms() == 10.0
