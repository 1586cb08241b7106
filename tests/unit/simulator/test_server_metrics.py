"""`/metrics` of the engine server: equal to vLLM's by name, and the values that requests change."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.profiles import load_profile
from fulcrum_simulator.engine import Engine, EngineRequest, Finished, KvExportRequest
from fulcrum_simulator.server.metric_families import (
    CounterFamily,
    GaugeFamily,
    HistogramFamily,
    format_labels,
    format_number,
)
from fulcrum_simulator.server.metrics import CacheConfig, EngineMetrics, token_count_buckets
from tests.paths import GOLDEN

CACHE = CacheConfig(block_tokens=32, num_blocks=2048, kv_bytes=67108864, max_model_tokens=4096)
OWN_METRICS = {"fulcrum_engine_step_lateness_seconds", "fulcrum_engine_step_lateness_seconds_created"}


def parse_structure(text: str) -> dict[str, dict[str, Any]]:
    """Parse names, types, help texts, label names, series and bucket edges, in order; no values."""
    families: dict[str, dict[str, Any]] = {}
    current: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, help_text = line.split(" ", 3)
            current = families[name] = {
                "type": "",
                "help": help_text,
                "labels": None,
                "series": [],
                "edges": [],
            }
        elif line.startswith("# TYPE "):
            current["type"] = line.split(" ")[3]
        else:
            _add_sample(current, line)
    return {
        name: {key: value for key, value in family.items() if value or key == "help"}
        for name, family in families.items()
    }


def _add_sample(family: dict[str, Any], line: str) -> None:
    labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line))
    edge = labels.pop("le", None)
    if edge is not None:
        family["edges"].append(edge)
    family["labels"] = sorted(labels)
    own = {name: value for name, value in labels.items() if name not in ("engine", "model_name")}
    if len(own) == 1 and own not in family["series"]:
        family["series"].append(own)


def read_values(text: str, name: str) -> dict[str, float]:
    """Return the samples of a family by their labels, without `engine` and `model_name`."""
    found = re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", text, re.MULTILINE)
    values = {}
    for labels, value in found:
        own = [label for label in labels.split(",") if not label.startswith(("engine=", "model_name="))]
        values[",".join(own)] = float(value)
    return values


def new_metrics() -> EngineMetrics:
    """Build the metrics of an engine like the one that the golden file was recorded from."""
    return EngineMetrics(model="tiny", cache=CACHE, created_s=1.795e9)


def test_names_types_labels_and_buckets_equal_those_of_vllm() -> None:
    engine = Engine(load_profile("laptop"), engine_id="a")
    found = parse_structure(new_metrics().render(engine.gauges, engine.stats).decode())
    assert found.keys() >= OWN_METRICS
    ours = {name: family for name, family in found.items() if name not in OWN_METRICS}
    assert ours == json.loads((GOLDEN / "vllm_metrics.json").read_text())
    assert list(ours) == list(json.loads((GOLDEN / "vllm_metrics.json").read_text()))


def test_a_prefill_leg_and_a_plain_request_change_the_same_metrics_as_on_vllm() -> None:
    engine, metrics = Engine(load_profile("laptop"), engine_id="a"), new_metrics()
    plain = EngineRequest(id="plain", arrival_s=0.0, prompt_tokens=100, max_tokens=3, digest=b"p" * 16)
    engine.submit(replace(plain, id="p", max_tokens=1, kv_transfer=KvExportRequest()))
    engine.submit(plain)
    now_s = 0.0
    while (step := engine.start_step(now_s)) is not None:
        now_s += step.duration_s
        for event in engine.finish_step(now_s):
            if isinstance(event, Finished):
                metrics.record_finished(event)
    text = metrics.render(engine.gauges, engine.stats).decode()
    assert read_values(text, "vllm:generation_tokens_total") == {"": 4}
    assert read_values(text, "vllm:prompt_tokens_by_source_total") == {
        'source="local_compute"': 200,
        'source="local_cache_hit"': 0,
        'source="external_kv_transfer"': 0,
    }
    assert read_values(text, "vllm:time_to_first_token_seconds_count") == {"": 2}
    assert read_values(text, "vllm:inter_token_latency_seconds_count") == {"": 2}
    assert read_values(text, "vllm:request_time_per_output_token_seconds_count") == {"": 2}
    assert read_values(text, "vllm:request_success_total")['finished_reason="length"'] == 2
    assert read_values(text, "vllm:kv_cache_usage_perc") == {"": pytest.approx(7 / engine.profile.kv_blocks)}


def test_samples_are_counted_once_however_often_they_are_scraped() -> None:
    engine, metrics = Engine(load_profile("laptop"), engine_id="a"), new_metrics()
    engine.stats.samples.itl_s += [0.02, 0.03]
    texts = [metrics.render(engine.gauges, engine.stats).decode() for _ in range(2)]
    assert [read_values(text, "vllm:inter_token_latency_seconds_count") for text in texts] == [{"": 2}] * 2
    assert [read_values(text, "vllm:inter_token_latency_seconds_sum") for text in texts] == [{"": 0.05}] * 2


def test_a_lost_notification_counts_as_a_failed_transfer_too() -> None:
    engine, metrics = Engine(load_profile("laptop"), engine_id="a"), new_metrics()
    engine.stats.failed_transfers = 2
    metrics.record_failed_notification()
    text = metrics.render(engine.gauges, engine.stats).decode()
    assert read_values(text, "vllm:nixl_num_failed_transfers_total") == {"": 3}
    assert read_values(text, "vllm:nixl_num_failed_notifications_total") == {"": 1}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0"),
        (20, "20.0"),
        (0.1, "0.1"),
        (-3.5, "-3.5"),
        (2097152, "2.097152e+06"),
        (1795224615.5, "1.7952246155e+09"),
        (float("inf"), "+Inf"),
    ],
)
def test_numbers_are_written_as_the_python_client_writes_them(value: float, text: str) -> None:
    assert format_number(value) == text


def test_label_values_are_escaped_and_sorted_by_name() -> None:
    assert format_labels({"b": 'say "hi"', "a": "back\\slash\nline"}) == (
        r'{a="back\\slash\nline",b="say \"hi\""}'
    )


def test_edges_for_token_counts_stop_at_the_longest_sequence() -> None:
    assert token_count_buckets(4096) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert token_count_buckets(1) == (1,)


def test_a_histogram_counts_cumulatively_and_a_value_on_an_edge_lies_below_it() -> None:
    histogram = HistogramFamily("h", "Help.", {"a": "1"}, buckets=(1, 2), created_s=5)
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)
    assert histogram.render() == (
        "# HELP h Help.\n# TYPE h histogram\n"
        'h_bucket{a="1",le="1.0"} 2.0\nh_bucket{a="1",le="2.0"} 3.0\nh_bucket{a="1",le="+Inf"} 4.0\n'
        'h_count{a="1"} 4.0\nh_sum{a="1"} 12.0\n'
        '# HELP h_created Help.\n# TYPE h_created gauge\nh_created{a="1"} 5.0\n'
    )


@pytest.mark.parametrize(("share", "edge"), [(0.5, 1.0), (0.75, 2.0), (1.0, float("inf"))])
def test_a_quantile_is_the_upper_edge_of_its_bucket(share: float, edge: float) -> None:
    histogram = HistogramFamily("h", "Help.", {}, buckets=(1, 2), created_s=0)
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)
    assert histogram.quantile(share) == edge


def test_a_quantile_without_observations_is_zero() -> None:
    assert HistogramFamily("h", "Help.", {}, buckets=(1,), created_s=0).quantile(0.99) == 0


def test_the_series_of_one_family_differ_in_one_label() -> None:
    gauge = GaugeFamily("g", "Help.", {"a": "1"}, label="reason", label_values=("x", "y"))
    gauge.set(2, "y")
    counter = CounterFamily("c", "Help.", {}, created_s=7)
    counter.set(3)
    assert gauge.render() == (
        '# HELP g Help.\n# TYPE g gauge\ng{a="1",reason="x"} 0.0\ng{a="1",reason="y"} 2.0\n'
    )
    assert counter.render() == (
        "# HELP c_total Help.\n# TYPE c_total counter\nc_total 3.0\n"
        "# HELP c_created Help.\n# TYPE c_created gauge\nc_created 7.0\n"
    )
