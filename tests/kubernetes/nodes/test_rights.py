"""Nobody may do more than they do: roles are held to the API server's audit log.

It runs last: by then the log tells of all scenarios. Alone, it tells of the life that is led here.
"""

import json
from functools import partial

import pytest

from fulcrum_core.api import PDService
from fulcrum_operator.plan.children import children_of
from fulcrum_operator.plan.labels import Account, ClusterSettings
from tests.kubernetes.nodes.installation import NAMESPACE, NEXT_IMAGE
from tests.kubernetes.nodes.rights import Right, granted, refused, rights_of, used
from tests.kubernetes.nodes.service import INSTANCES, Service
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

OPERATOR, AUTOSCALER = "fulcrum-operator", "fulcrum-autoscaler"


def router_rights(service: Service) -> set[Right]:
    """What the operator grants to the service's router."""
    accounts = Account(NAMESPACE, OPERATOR), Account(NAMESPACE, AUTOSCALER)
    settings = ClusterSettings(image="i", operator=accounts[0], autoscaler=accounts[1])
    chat = PDService.model_validate(service.read("pdservices"))
    (role,) = (child for child in children_of(chat, settings, wanted=1) if child["kind"] == "Role")
    return rights_of(role["rules"])


@pytest.fixture
def lived(cluster: Cluster, service: Service) -> Service:
    """The service after a flip, a scaling, a name that was taken, a lost pod, a roll-out, a new leader."""
    name, role = service.flip_one()
    wait_for(partial(service.plays, name, role), "the flip", timeout_s=60)
    with_name_taken(cluster, service)
    cluster.kubectl("delete", "pod", "chat-0", "--wait=false")
    service.wait_whole(timeout_s=120)
    service.patch("pdservices", {"spec": {"engine": {"image": NEXT_IMAGE}}})
    wait_for(lambda: {pod.image for pod in service.engines()} == {NEXT_IMAGE}, "the roll-out", timeout_s=180)
    leader = cluster.read(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{OPERATOR}")
    cluster.kubectl("delete", "pod", f"--namespace={NAMESPACE}", leader["spec"]["holderIdentity"])
    service.patch("pdservices", {"spec": {"engine": {"image": None}}})
    wait_for(
        lambda: NEXT_IMAGE not in {pod.image for pod in service.engines()}, "its way back", timeout_s=180
    )
    service.wait_whole(timeout_s=120)
    return service


def with_name_taken(cluster: Cluster, service: Service) -> None:
    """Scale up where somebody else's pod has the next name, and down again."""
    taken = f"chat-{INSTANCES}"
    container = {"name": "other", "image": "localhost/busybox:1"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": taken},
        "spec": {"containers": [container]},
    }
    cluster.request("POST", "/api/v1/namespaces/default/pods", json.dumps(body).encode())
    service.patch("pdservices", {"spec": {"instances": INSTANCES + 1}})
    wait_for(lambda: taken in service.instances(), "an instance of the taken name", timeout_s=60)
    cluster.kubectl("delete", "pod", taken, "--grace-period=1")
    service.wait_whole(INSTANCES + 1, timeout_s=120)
    service.patch("pdservices", {"spec": {"instances": INSTANCES}})
    service.wait_whole(timeout_s=120)


@pytest.mark.timeout(900)
def test_what_each_part_may_do_is_what_it_does(cluster: Cluster, lived: Service) -> None:
    router = router_rights(lived)
    accounts = {
        "operator": (NAMESPACE, OPERATOR, granted(cluster, NAMESPACE, OPERATOR), router),
        "autoscaler": (NAMESPACE, AUTOSCALER, granted(cluster, NAMESPACE, AUTOSCALER), set()),
        "router": ("default", "chat-router", router, set()),
    }
    idle = {
        part: sorted(held - handed_on - used(cluster, namespace, account))
        for part, (namespace, account, held, handed_on) in accounts.items()
    }
    missing = {
        part: sorted(refused(cluster, namespace, account))
        for part, (namespace, account, _, _) in accounts.items()
    }
    nothing: dict[str, list[Right]] = {part: [] for part in accounts}
    assert (idle, missing) == (nothing, nothing)
