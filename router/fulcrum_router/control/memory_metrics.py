"""Families of the memory that the router holds for its clients. `metrics` yields them with the others."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fulcrum_router.http1.limits import RequestMemory


def build_memory_families(memory: RequestMemory) -> Iterator[Metric]:
    """Build what is held, its limit, and what was refused."""
    yield CounterMetricFamily(
        "fulcrum_router_memory_refusals",
        "Requests and unsent responses that were refused because the router had no memory for them.",
        memory.refusals,
    )
    for name, text, value in (
        ("request_memory_bytes", "Bytes of requests held.", memory.held_bytes),
        ("request_memory_max_bytes", "Limit of fulcrum_router_request_memory_bytes.", memory.max_bytes),
        (
            "unsent_response_bytes",
            "Bytes of responses that clients have not read, at most half of "
            "fulcrum_router_request_memory_max_bytes and not part of fulcrum_router_request_memory_bytes.",
            memory.unsent_bytes,
        ),
    ):
        yield GaugeMetricFamily(f"fulcrum_router_{name}", text, value)
