"""What the router counts is what `kubectl get pds` shows. The test plays the nodes, and the router."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulcrum_core.state import TierState
from tests.kubernetes.control_plane.operators import (
    Answers,
    Kubelet,
    Space,
    engines_at,
    operators,
    served,
    some_address,
    until,
)
from tests.kubernetes.control_plane.test_operator_leader import QUIET_S, writes
from tests.unit.core.states import router_state
from tools.kubernetes.cluster import Cluster

COLUMNS = ["NAME", "MODEL", "READY", "P", "D", "RATIO", "KV", "SLO", "FLIPS", "AGE"]


class Router:
    """A state port that tells what it is set to."""

    url = ""

    def __init__(self) -> None:
        self.asked = 0
        self.counts(0, 0)

    def counts(self, ended: int, met: int) -> None:
        """Of the tier `default`, since it started."""
        missed = ended - met
        tier = TierState(
            name="default", offered=ended, ok=met, failed=missed, broken=0, cancelled=0, slo_met=met
        )
        self.body = router_state(tiers=(tier,)).model_dump_json().encode()


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()

    class Handler(Answers):
        def do_GET(self) -> None:
            made.asked += 1
            self.answer(200, made.body)

    with served(Handler, "127.0.0.1") as port:
        made.url = f"http://127.0.0.1:{port}"
        yield made


def test_attainment_is_a_column_and_is_written_no_more_while_it_stays(
    control_plane: Cluster, namespace: str, router: Router, tmp_path: Path
) -> None:
    space, address = Space(control_plane, namespace), some_address()

    def printed() -> list[list[str]]:
        text = control_plane.kubectl("get", "pds", f"--namespace={namespace}")
        return [line.split() for line in text.splitlines()]

    with operators(control_plane, namespace, tmp_path) as start, engines_at(address):
        until(start("op-a", "--router-state", router.url).leads, "the operator to lead")
        space.service(instances=2)
        until(lambda: {"chat-0", "chat-1"} <= set(space.names("pods")), "the pods")
        Kubelet(space, address).ready("chat-0", "chat-1")
        endpoint = {"addresses": ["10.1.2.3"], "conditions": {"ready": True}}
        space.patch("discovery.k8s.io/v1/endpointslices", "chat-router", {"endpoints": [endpoint]})
        until(
            lambda: space.condition("SLOMet")["reason"] == "NoTraffic", "a look at the router", timeout_s=60
        )
        assert (printed()[0], router.asked > 0) == (COLUMNS, True)
        router.counts(1000, 987)
        until(lambda: space.condition("SLOMet")["status"] == "False", "a verdict", timeout_s=60)
        _, line = printed()
        status = space.get("pdservices", "chat")["status"]
        assert (line[COLUMNS.index("SLO")], status["attainment"], status["tiers"]) == (
            "98.7",
            "98.7",
            [{"name": "default", "attainment": "98.7", "offered": 1000}],
        )
        settled, asked = time.time() + 1.0, router.asked
        until(lambda: time.time() >= settled + QUIET_S, "a quiet time", timeout_s=30)
    assert (writes(control_plane, namespace, settled, settled + QUIET_S), router.asked > asked) == ({}, True)
