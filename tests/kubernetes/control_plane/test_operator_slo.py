"""`kubectl get pds` shows the SLO attainment from the router's counters. Router and nodes are fakes."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulcrum_core.router_state import TierState
from tests.kubernetes.control_plane.operator_process import (
    FakeKubelet,
    NamespaceClient,
    QuietHandler,
    operator_starter,
    pick_loopback_address,
    serve_engines,
    serve_http,
    wait_until,
)
from tests.kubernetes.control_plane.test_operator_leader import QUIET_S, writes
from tests.unit.core.router_states import router_state
from tools.kubernetes.cluster import Cluster

COLUMNS = ["NAME", "MODEL", "ENGINE", "READY", "P", "D", "RATIO", "KV", "SLO", "FLIPS", "REASON", "AGE"]


class FakeRouter:
    """A state port that returns the counters that a test sets."""

    url = ""

    def __init__(self) -> None:
        self.requests = 0
        self.set_counts(0, 0)

    def set_counts(self, ended: int, met: int) -> None:
        """Set the counters of the tier `default` since the router's start."""
        missed = ended - met
        tier = TierState(
            name="default", offered=ended, ok=met, failed=missed, broken=0, cancelled=0, slo_met=met
        )
        self.body = router_state(tiers=(tier,)).model_dump_json().encode()


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    fake = FakeRouter()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            fake.requests += 1
            self.respond(200, fake.body)

    with serve_http(Handler, "127.0.0.1") as port:
        fake.url = f"http://127.0.0.1:{port}"
        yield fake


def test_attainment_is_a_column_and_is_not_rewritten_while_unchanged(
    control_plane: Cluster, namespace: str, router: FakeRouter, tmp_path: Path
) -> None:
    api, address = NamespaceClient(control_plane, namespace), pick_loopback_address()

    def printed() -> list[list[str]]:
        text = control_plane.kubectl("get", "pds", f"--namespace={namespace}")
        return [line.split() for line in text.splitlines()]

    with operator_starter(control_plane, namespace, tmp_path) as start, serve_engines(address):
        wait_until(start("op-a", "--router-state", router.url).is_leader, "the operator to lead")
        api.service(instances=2)
        wait_until(lambda: {"chat-0", "chat-1"} <= set(api.names("pods")), "the pods")
        FakeKubelet(api, address).set_ready("chat-0", "chat-1")
        endpoint = {"addresses": ["10.1.2.3"], "conditions": {"ready": True}}
        api.patch("discovery.k8s.io/v1/endpointslices", "chat-router", {"endpoints": [endpoint]})
        wait_until(lambda: router.requests > 0, "a poll of the router", timeout_s=60)
        wait_until(lambda: api.condition("SLOMet")["reason"] == "NoTraffic", "its result", timeout_s=60)
        assert printed()[0] == COLUMNS
        router.set_counts(1000, 987)
        wait_until(lambda: api.condition("SLOMet")["status"] == "False", "the condition", timeout_s=60)
        _, line = printed()
        status = api.get("pdservices", "chat")["status"]
        assert (line[COLUMNS.index("SLO")], status["attainment"], status["tiers"]) == (
            "98.7",
            "98.7",
            [{"name": "default", "attainment": "98.7", "ended": 1000}],
        )
        settled, requests = time.time() + 1.0, router.requests
        wait_until(lambda: time.time() >= settled + QUIET_S, "a quiet time", timeout_s=30)
    assert (writes(control_plane, namespace, settled, settled + QUIET_S), router.requests > requests) == (
        {},
        True,
    )
