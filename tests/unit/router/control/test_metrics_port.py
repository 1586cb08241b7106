"""The page of the metrics port: rendered rarely, in slices, and once for all who ask."""

import asyncio
import copy
import math
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fulcrum_router.control.metrics_port import SLICE_SAMPLES, MetricsPage
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
