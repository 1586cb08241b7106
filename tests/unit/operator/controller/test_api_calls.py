"""The operator's metrics count its requests to the API server, by method and status."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from fulcrum_operator.controller.metrics import ApiCallCollector


def test_responses_are_counted_by_method_and_status() -> None:
    registry, responses = CollectorRegistry(), {("GET", 200): 3, ("PATCH", 0): 1}
    registry.register(ApiCallCollector(responses))
    responses["GET", 200] += 1
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'fulcrum_operator_api_requests_total{method="GET",status="200"} 4.0',
        'fulcrum_operator_api_requests_total{method="PATCH",status="none"} 1.0',
    ]
