"""The page of the metrics port: rendered rarely, in slices, and once for all who ask."""

import asyncio
import copy
import math
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fulcrum_core.values import Slo
from fulcrum_router.control.metrics_port import SLICE_SAMPLES, MetricsPage
from fulcrum_router.control.tier_metrics import build_tier_families
from fulcrum_router.counters import Counters, RequestOutcome
from fulcrum_router.settings import Tier
from tests.waiting import yield_control


class FakeCollector(Collector):
    """Some families, one of them large; counts how often they are collected."""

    def __init__(self, samples: int = 1) -> None:
        self.samples, self.collections = samples, 0

    def collect(self) -> Iterable[Metric]:
        self.collections += 1
        counter = CounterMetricFamily("requests", "Requests, by number.", labels=["number"])
        for number in range(self.samples):
            counter.add_metric([str(number)], self.collections)
        histogram = HistogramMetricFamily("ttft_seconds", "Times.", labels=["tier"])
        histogram.add_metric(["a"], [("0.5", 1.0), ("+Inf", 2.0)], 3.0)
        yield from (counter, GaugeMetricFamily("empty", "Nothing.", labels=["x"]), histogram)


async def test_a_page_in_slices_is_the_page_that_prometheus_renders() -> None:
    samples = 3 * SLICE_SAMPLES + 1
    assert await MetricsPage(FakeCollector(samples)).read() == generate_latest(FakeCollector(samples))


async def test_other_tasks_run_between_the_slices_of_a_page() -> None:
    page, turns = MetricsPage(FakeCollector(10 * SLICE_SAMPLES)), 0
    reading = asyncio.ensure_future(page.read())
    while not reading.done():
        await yield_control(1)
        turns += 1
    assert turns > 10


async def test_a_page_is_rendered_at_most_once_a_second_whoever_asks() -> None:
    now_s, collector = 100.0, FakeCollector()
    page = MetricsPage(collector, clock=lambda: now_s)
    first = await asyncio.gather(*(page.read() for _ in range(5)))
    now_s = 100.9
    again = await page.read()
    assert (set(first), collector.collections) == ({again}, 1)
    now_s = 101.0
    assert await page.read() != again
    assert collector.collections == 2


async def test_a_reader_that_disconnects_does_not_end_the_page_of_the_others() -> None:
    page = MetricsPage(FakeCollector())
    leaving, connected = (asyncio.ensure_future(page.read()) for _ in range(2))
    await yield_control(1)
    leaving.cancel()
    assert (await connected).startswith(b"# HELP requests_total")


async def test_openmetrics_has_the_trace_of_the_last_request_in_each_bucket() -> None:
    counters = Counters()
    tier = Tier("gold", Slo(ttft_s=1.0, tpot_s=0.1))
    for trace_id, ttft_s in ((7, 0.3), (8, 0.21), (9, 90.0)):
        counters.record_request(tier, RequestOutcome.OK, ttft_s=ttft_s)
        counters.keep_exemplars(tier, trace_id, at_s=1000.5, ttft_s=ttft_s, response_s=None)

    class Tiers(Collector):
        def collect(self) -> Iterable[Metric]:
            return build_tier_families(counters)

    text = (await MetricsPage(Tiers(), open_metrics=True).read()).decode()
    kept = {
        sample.labels["le"]: (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert kept == {"0.3": (f"{8:032x}", 0.21), "+Inf": (f"{9:032x}", 90.0)}
    assert b"trace_id" not in await MetricsPage(Tiers()).read()


async def test_openmetrics_in_slices_is_the_page_that_the_library_renders() -> None:
    samples = 3 * SLICE_SAMPLES + 1
    expected = openmetrics.generate_latest(FakeCollector(samples))  # type: ignore[no-untyped-call]
    assert await MetricsPage(FakeCollector(samples), open_metrics=True).read() == expected


@pytest.mark.parametrize("value", ["plain", "", 'a "quoted" one', "back\\slash", "two\nlines", "ümlaut, {}"])
async def test_the_page_is_the_one_that_the_library_renders(value: str) -> None:
    registry = CollectorRegistry()
    Gauge("fulcrum_a", "Help\nof \\ it.", ["one", "two"], registry=registry).labels(value, "x").set(1e-9)
    Counter("fulcrum_b", "Help.", registry=registry, labelnames=["z", "a"]).labels("1", value).inc(3)
    Gauge("fulcrum_c", "Help.", registry=registry).set(math.nan)
    families = list(registry.collect())
    for family in families:
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]

    class Families(Collector):
        def collect(self) -> list[Metric]:
            return copy.deepcopy(families)

    assert await MetricsPage(Families()).read() == generate_latest(Families())
