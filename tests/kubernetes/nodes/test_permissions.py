"""Each granted permission is used and none is missing, by the API server's audit log.

Runs after the other scenarios, whose requests are in the log; causes the requests that are missing there.
"""

import json
from functools import partial

import pytest

from fulcrum_core.api import PDService
from fulcrum_operator.manifests.children import service_children
from fulcrum_operator.manifests.names import InstallationSettings, ServiceAccount
from tests.kubernetes.nodes.installation import NAMESPACE
from tests.kubernetes.nodes.load import run_load
from tests.kubernetes.nodes.permissions import (
    Permission,
    expand_rules,
    list_forbidden,
    list_granted,
    list_used,
)
from tests.kubernetes.nodes.service import INSTANCES, DeployedService
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

OPERATOR, AUTOSCALER = "fulcrum-operator", "fulcrum-autoscaler"
ONLY_AFTER_CONFLICT: set[Permission] = {
    ("fulcrum.dev", plural, "get") for plural in ("pdassignments", "pdpools", "pdservices")
}
"""Permissions that operator and autoscaler use only after a write conflict."""
ONLY_IF_TAKEN: set[Permission] = {
    *(("", resource, "get") for resource in ("services", "serviceaccounts")),
    ("apps", "deployments", "get"),
    ("policy", "poddisruptionbudgets", "get"),
    ("networking.k8s.io", "networkpolicies", "get"),
    *(("rbac.authorization.k8s.io", resource, "get") for resource in ("roles", "rolebindings")),
}
"""Permissions that the operator uses only if an object has the name of a child, or changes meanwhile."""
ONLY_TO_ADOPT: set[Permission] = {
    *(("", resource, "delete") for resource in ("services", "serviceaccounts")),
    *(("fulcrum.dev", "pdassignments", "delete"), ("apps", "deployments", "delete")),
    *(("policy", "poddisruptionbudgets", "delete"), ("networking.k8s.io", "networkpolicies", "delete")),
    *(("rbac.authorization.k8s.io", resource, "delete") for resource in ("roles", "rolebindings")),
    *(("coordination.k8s.io", "leases", "delete"), ("discovery.k8s.io", "endpointslices", "delete")),
}
"""Permissions without which an admission plugin refuses to change the owners of an object."""


def expand_router_rules(service: DeployedService) -> set[Permission]:
    """Return the permissions that the operator grants to the service's router."""
    accounts = ServiceAccount(NAMESPACE, OPERATOR), ServiceAccount(NAMESPACE, AUTOSCALER)
    settings = InstallationSettings(image="i", operator=accounts[0], autoscaler=accounts[1])
    chat = PDService.model_validate(service.read("pdservices"))
    (role,) = (
        child for child in service_children(chat, settings, min_available=1) if child["kind"] == "Role"
    )
    return expand_rules(role["rules"])


def delete_a_pod(cluster: Cluster, service: DeployedService, _seed: int) -> None:
    """Delete an engine pod."""
    cluster.kubectl("delete", "pod", min(service.instances()), "--wait=false")
    service.wait_until_ready(timeout_s=120)


def add_and_remove_a_pool(cluster: Cluster, service: DeployedService, _seed: int) -> None:
    """Add a pool whose instance has the name of an existing foreign pod, and remove the pool."""
    used_names = service.instances()
    taken = next(name for n in range(INSTANCES + 1) if (name := f"chat-{n}") not in used_names)
    container = {"name": "other", "image": "localhost/busybox:1"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": taken},
        "spec": {"containers": [container]},
    }
    cluster.request("POST", "/api/v1/namespaces/default/pods", json.dumps(body).encode())
    pools = [{"name": "flex", "instances": {"min": INSTANCES}}, {"name": "more", "instances": {"min": 1}}]
    service.patch("pdservices", {"spec": {"instances": None, "pools": pools}})
    wait_for(lambda: taken in service.instances(), "an instance of the taken name", timeout_s=60)
    cluster.kubectl("delete", "pod", taken, "--grace-period=1")
    service.wait_until_ready(INSTANCES + 1, timeout_s=120)
    service.patch("pdservices", {"spec": {"instances": INSTANCES, "pools": None}})
    service.wait_until_ready(timeout_s=120)


def replace_the_leader(cluster: Cluster, service: DeployedService, _seed: int) -> None:
    """Delete the leading operator between two roll-outs; in the first, flips restart engines."""
    roll_out = partial(_roll_out_flip_strategy, service)
    roll_out("Restart")
    name, role = service.flip_one_instance()
    wait_for(partial(service.serves_role, name, role), "the flip", timeout_s=120)
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{OPERATOR}"
    leader = cluster.read(lease)["spec"]["holderIdentity"]
    cluster.kubectl("delete", "pod", f"--namespace={NAMESPACE}", leader)
    roll_out("Auto")


def _roll_out_flip_strategy(service: DeployedService, value: str) -> None:
    """Change the flip strategy, which rolls out all instances."""
    before = {pod.uid for pod in service.engines()}
    service.patch("pdservices", {"spec": {"autoscaling": {"flip": {"strategy": value}}}})
    wait_for(
        lambda: not before & {pod.uid for pod in service.engines()}, f"the roll-out of {value}", timeout_s=240
    )
    service.wait_until_ready(timeout_s=120)


def let_the_autoscaler_flip(cluster: Cluster, service: DeployedService, seed: int) -> None:
    """Set a TPOT that cannot be met, so that the autoscaler flips an instance to decode.

    The load is dense enough for each tick: at 5 requests a second, each decoding for 1/8 s, the ticks might
    fall into the gaps for minutes.
    """

    def has_flipped() -> bool:
        return "Autoscaler" in {entry["by"] for entry in service.read_assignment_entries().values()}

    if [entry["role"] for entry in service.read_assignment_entries().values()].count("Prefill") < 2:
        name, role = service.flip_one_instance()  # the floor forbids to flip the only one
        wait_for(partial(service.serves_role, name, role), "a second prefill instance", timeout_s=60)
    with run_load(cluster, service, seed, node="n1", report=print):
        service.patch("pdservices", {"spec": {"slo": {"tpot": "1ms"}}})
        wait_for(has_flipped, "a flip by the autoscaler", timeout_s=90)
        service.patch("pdservices", {"spec": {"slo": {"tpot": None}}})


SCENARIOS = (add_and_remove_a_pool, delete_a_pod, let_the_autoscaler_flip, replace_the_leader)


@pytest.mark.timeout(900)
def test_every_component_uses_every_permission_it_has_and_no_other(
    cluster: Cluster, service: DeployedService, seed: int
) -> None:
    router = expand_router_rules(service)
    accounts = {
        "operator": (
            NAMESPACE,
            OPERATOR,
            list_granted(cluster, NAMESPACE, OPERATOR),
            router | ONLY_AFTER_CONFLICT | ONLY_IF_TAKEN | ONLY_TO_ADOPT,
        ),
        "autoscaler": (
            NAMESPACE,
            AUTOSCALER,
            list_granted(cluster, NAMESPACE, AUTOSCALER),
            ONLY_AFTER_CONFLICT,
        ),
        "router": ("default", "chat-router", router, set()),
    }

    def list_unused() -> dict[str, list[Permission]]:
        return {
            part: sorted(granted - excused - list_used(cluster, namespace, account))
            for part, (namespace, account, granted, excused) in accounts.items()
        }

    for scenario in SCENARIOS:
        if any(unused := list_unused().values()):
            print(f"{scenario.__name__}, for {list(unused)}")
            scenario(cluster, service, seed)
    missing = {
        part: sorted(list_forbidden(cluster, namespace, account))
        for part, (namespace, account, _, _) in accounts.items()
    }
    nothing: dict[str, list[Permission]] = {part: [] for part in accounts}
    assert (list_unused(), missing) == (nothing, nothing)
