"""Doctor's checks of the cluster: CRDs, permissions, components, nodes, images and routers."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fulcrum_cli.doctor.access_reviews import service_account_of
from fulcrum_cli.doctor.components import check_deployment, check_lease
from fulcrum_cli.doctor.crd_schemas import check_crds
from fulcrum_cli.doctor.findings import CheckId, Component, Finding, Severity, worst_severity
from fulcrum_cli.doctor.gather import deployments_for_namespace
from fulcrum_cli.doctor.permissions import (
    AUTOSCALER_PERMISSIONS,
    USER_PERMISSIONS,
    AccessReview,
    Permission,
    check_service_account,
    check_user_permissions,
)
from fulcrum_cli.doctor.pod_checks import check_images, check_nodes, check_restarts, format_amount
from fulcrum_cli.doctor.routing import check_endpoints
from fulcrum_core.api.crds import build_crd
from fulcrum_core.api.labels import WATCHED_NAMESPACE_LABEL
from fulcrum_core.api.meta import format_time
from fulcrum_core.api.registry import KINDS

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM
NOW_S = 1_700_000_000.0
Body = dict[str, Any]


def summarise(finding: Finding) -> tuple[Severity, str]:
    return finding.severity, finding.observed


# CRDs

OURS = {f"{kind.plural}.fulcrum.dev": build_crd(kind) for kind in KINDS}
SERVICES = "pdservices.fulcrum.dev"


def crds_with(**changes: Any) -> dict[str, Any]:
    """Return the CRDs with changes to PDService: `lacks` a field, `has` another, a `maximum`, …"""
    kinds = copy.deepcopy(OURS)
    spec = kinds[SERVICES]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    if field := changes.get("lacks"):
        del spec["properties"][field]
    if field := changes.get("has"):
        spec["properties"][field] = {"type": "object", "properties": {"inner": {"type": "string"}}}
    if maximum := changes.get("maximum"):
        spec["properties"]["instances"]["maximum"] = maximum
    if description := changes.get("description"):
        spec["description"] = description
    if "established" in changes:
        status = "True" if changes["established"] else "False"
        kinds[SERVICES]["status"] = {"conditions": [{"type": "Established", "status": status}]}
    return {name: None if name == changes.get("without") else body for name, body in kinds.items()}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        pytest.param(crds_with(), (OK, "all 5 are installed in this program's version"), id="equal"),
        pytest.param(
            crds_with(description="another description", established=True),
            (OK, "all 5 are installed in this program's version"),
            id="other descriptions only",
        ),
        pytest.param(crds_with(without=SERVICES), (PROBLEM, f"missing: {SERVICES}"), id="a missing CRD"),
        pytest.param(
            crds_with(lacks="drain"),
            (PROBLEM, f"older than this program: {SERVICES} has no spec.drain"),
            id="older",
        ),
        pytest.param(
            crds_with(has="later"),
            (
                WARNING,
                f"newer than this program: {SERVICES} has spec.later, unknown to this program",
            ),
            id="newer",
        ),
        pytest.param(
            crds_with(maximum=7),
            (WARNING, f"{SERVICES} has different validation rules"),
            id="another maximum",
        ),
        pytest.param(
            crds_with(established=False),
            (WARNING, f"{SERVICES} is not established yet"),
            id="not established",
        ),
    ],
)
def test_crds_are_compared_field_by_field(kinds: Mapping[str, Any], expected: tuple[Severity, str]) -> None:
    assert summarise(check_crds(kinds, OURS)) == expected


# permissions


def access_reviews(
    permissions: Sequence[Permission], *, denied: int = 0, unknown: bool = False
) -> tuple[AccessReview, ...]:
    """The last `denied` of the permissions are denied."""
    allowed = len(permissions) - denied
    return tuple(
        AccessReview(permission, None if unknown else at < allowed)
        for at, permission in enumerate(permissions)
    )


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        pytest.param(
            check_user_permissions(access_reviews(USER_PERMISSIONS), namespace="n"),
            (OK, "you may read and change services in namespace n"),
            id="a user with all permissions",
        ),
        pytest.param(
            check_user_permissions(access_reviews(USER_PERMISSIONS, denied=2), namespace="n"),
            (
                WARNING,
                "in namespace n you have no permission to "
                "patch pdassignments.fulcrum.dev, get services/proxy",
            ),
            id="a user who may only read",
        ),
        pytest.param(
            check_user_permissions((AccessReview(USER_PERMISSIONS[0], False),), namespace="n"),
            (PROBLEM, "in namespace n you have no permission to list pdservices.fulcrum.dev"),
            id="a user without permissions",
        ),
        pytest.param(
            check_service_account(Component.AUTOSCALER, "f/a", access_reviews(AUTOSCALER_PERMISSIONS)),
            (OK, "ServiceAccount f/a has all permissions that it needs"),
            id="an account with all permissions",
        ),
        pytest.param(
            check_service_account(
                Component.AUTOSCALER, "f/a", access_reviews(AUTOSCALER_PERMISSIONS, denied=1)
            ),
            (PROBLEM, "ServiceAccount f/a has no permission to patch pdassignments.fulcrum.dev"),
            id="an account without one permission",
        ),
        pytest.param(
            check_service_account(
                Component.ROUTER, "f/a", access_reviews(AUTOSCALER_PERMISSIONS, unknown=True)
            ),
            (WARNING, "skipped: no permission to review the access of ServiceAccount f/a"),
            id="an account that may not be reviewed",
        ),
    ],
)
def test_missing_permissions_are_named(finding: Finding, expected: tuple[Severity, str]) -> None:
    assert summarise(finding) == expected


# components


def deployment(ready: int, replicas: int = 2, *conditions: Body) -> Body:
    return {
        "metadata": {"name": "fulcrum-operator", "namespace": "f"},
        "spec": {"replicas": replicas},
        "status": {"readyReplicas": ready, "conditions": list(conditions)},
    }


DEADLINE_EXCEEDED = {"type": "Progressing", "status": "False", "message": "deadline exceeded"}
WHERE = "Deployment f/fulcrum-operator"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(None, (WARNING, "skipped: no permission to list Deployments"), id="no permission"),
        pytest.param([], (PROBLEM, "the operator has no Deployment"), id="absent"),
        pytest.param([deployment(2)], (OK, f"{WHERE}: 2 of 2 replicas ready"), id="ready"),
        pytest.param([deployment(0)], (PROBLEM, f"{WHERE}: 0 of 2 replicas ready"), id="none ready"),
        pytest.param(
            [deployment(0, 0)], (PROBLEM, f"{WHERE}: 0 of 0 replicas ready"), id="scaled to nothing"
        ),
        pytest.param(
            [deployment(0, 1, DEADLINE_EXCEEDED)],
            (PROBLEM, f"{WHERE}: 0 of 1 replica ready: deadline exceeded"),
            id="a roll-out beyond its deadline",
        ),
        pytest.param(
            [deployment(2), deployment(1)],
            (WARNING, f"{WHERE}: 1 of 2 replicas ready"),
            id="one of two Deployments is not ready",
        ),
    ],
)
def test_a_component_without_ready_replicas_is_a_problem(
    found: list[Body] | None, expected: tuple[Severity, str]
) -> None:
    assert summarise(check_deployment(Component.OPERATOR, found, advice_absent="install it")) == expected


def test_a_deployment_with_a_standby_missing_still_works() -> None:
    assert check_deployment(Component.ROUTER, [deployment(1)], advice_absent="").severity is WARNING


def lease(holder: str | None, age_s: float) -> Body:
    spec = {"holderIdentity": holder, "renewTime": format_time(NOW_S - age_s), "leaseDurationSeconds": 15}
    return {"metadata": {"name": "fulcrum-operator", "namespace": "f"}, "spec": spec}


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param(None, (PROBLEM, "the Lease is missing"), id="absent"),
        pytest.param(lease(None, 0), (PROBLEM, "Lease f/fulcrum-operator has no holder"), id="released"),
        pytest.param(lease("o-1", 14), (OK, "o-1 holds Lease f/fulcrum-operator"), id="held"),
        pytest.param(
            lease("o-1", 90),
            (
                PROBLEM,
                "Lease f/fulcrum-operator of o-1 was last renewed 1m30s ago and expired after 15s",
            ),
            id="stale",
        ),
    ],
)
def test_an_expired_lease_is_a_problem(held: Body | None, expected: tuple[Severity, str]) -> None:
    assert summarise(check_lease(CheckId.LEADER, held, now_s=NOW_S, advice="")) == expected


def installed(namespace: str, *, watches: str | None = None) -> Body:
    labels = {WATCHED_NAMESPACE_LABEL: watches} if watches else {}
    sidecar = {"name": "sidecar", "args": ["--namespace=o"]}
    pods = {"spec": {"serviceAccountName": "sa", "containers": [sidecar]}}
    meta = {"name": "op", "namespace": namespace, "labels": labels}
    return {"metadata": meta, "spec": {"template": pods}}


FOR_ALL, FOR_N, FOR_OTHERS = installed("f"), installed("g", watches="n"), installed("h", watches="o")


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        pytest.param([FOR_ALL, FOR_N, installed("n")], [installed("n")], id="installed in the namespace"),
        pytest.param([FOR_ALL, FOR_N, FOR_OTHERS], [FOR_N], id="for this namespace only"),
        pytest.param([FOR_ALL, FOR_OTHERS], [FOR_ALL], id="for all namespaces"),
        pytest.param([FOR_OTHERS], [], id="none"),
    ],
)
def test_the_installation_that_manages_the_namespace_is_examined(
    there: list[Body], expected: list[Body]
) -> None:
    assert deployments_for_namespace(there, "n") == expected
    assert service_account_of(FOR_ALL) == ("f", "sa")


# nodes and images


def pod(name: str = "chat-0", *, unschedulable_message: str | None = None, **spec: Any) -> Body:
    requests = spec.pop("requests", {"cpu": "2", "memory": "8Gi"})
    conditions = (
        [{"type": "PodScheduled", "status": "False", "message": unschedulable_message}]
        if unschedulable_message is not None
        else []
    )
    placed = {} if unschedulable_message is not None else {"nodeName": "n1"}
    containers = [{"resources": {"requests": requests}}]
    return {
        "metadata": {"name": name},
        "spec": {"containers": containers, **placed, **spec},
        "status": {"conditions": conditions},
    }


def node(name: str = "n1", *taints: Body, cpu: str = "4", **spec: Any) -> Body:
    return {
        "metadata": {"name": name},
        "spec": {"taints": list(taints), **spec},
        "status": {"allocatable": {"cpu": cpu, "memory": "16Gi"}},
    }


GPU = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
PENDING = pod(unschedulable_message="0/1 nodes are available")
UNSCHEDULABLE = "no node fits chat-0: 0/1 nodes are available"


@pytest.mark.parametrize(
    ("pods", "nodes", "expected", "advice"),
    [
        pytest.param([pod(), pod("chat-1")], [], (OK, "2 of 2 pods on a node"), "", id="all placed"),
        pytest.param(
            [PENDING],
            None,
            (PROBLEM, UNSCHEDULABLE),
            "no permission to list nodes",
            id="no permission to list nodes",
        ),
        pytest.param(
            [PENDING], [], (PROBLEM, UNSCHEDULABLE), "the cluster has no node: add one", id="no node"
        ),
        pytest.param(
            [PENDING],
            [node(cpu="1")],
            (PROBLEM, f"{UNSCHEDULABLE}; it requests 2 cpu, the largest node has 1 cpu"),
            "add larger nodes",
            id="too large for every node",
        ),
        pytest.param(
            [pod(unschedulable_message="0/1 nodes are available", requests={"nvidia.com/gpu": "4"})],
            [node()],
            (
                PROBLEM,
                f"{UNSCHEDULABLE}; it requests 4 nvidia.com/gpu, the largest node has 0 nvidia.com/gpu",
            ),
            "add larger nodes",
            id="a device that no node has",
        ),
        pytest.param(
            [PENDING],
            [node("n1", GPU)],
            (PROBLEM, UNSCHEDULABLE),
            "tolerate gpu=yes:NoSchedule (node n1)",
            id="a taint",
        ),
        pytest.param(
            [
                pod(
                    unschedulable_message="0/1 nodes are available",
                    tolerations=[{"key": "gpu", "operator": "Exists"}],
                )
            ],
            [node("n1", GPU)],
            (PROBLEM, UNSCHEDULABLE),
            "are full",
            id="a taint that is tolerated",
        ),
        pytest.param(
            [PENDING],
            [node("n1", unschedulable=True)],
            (PROBLEM, UNSCHEDULABLE),
            "kubectl uncordon",
            id="cordoned",
        ),
        pytest.param([PENDING], [node()], (PROBLEM, UNSCHEDULABLE), "are full", id="large enough and full"),
    ],
)
def test_an_unschedulable_pod_is_reported_with_the_reason(
    pods: list[Body], nodes: list[Body] | None, expected: tuple[Severity, str], advice: str
) -> None:
    finding = check_nodes(pods, nodes)
    assert summarise(finding) == expected
    assert advice in finding.advice


def waiting(reason: str, message: str = "", *, restarts: int = 0, name: str = "chat-0") -> Body:
    state = {"waiting": {"reason": reason, "message": message}}
    status = {"image": "reg/x:1", "state": state, "restartCount": restarts}
    return {"metadata": {"name": name}, "spec": {}, "status": {"containerStatuses": [status]}}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([pod()], (OK, "1 pod, all with their image"), id="pulled"),
        pytest.param(
            [waiting("ContainerCreating")],
            (OK, "1 pod, all with their image"),
            id="another reason",
        ),
        pytest.param(
            [waiting("ImagePullBackOff", "Back-off")],
            (PROBLEM, "chat-0: ImagePullBackOff reg/x:1: Back-off"),
            id="back-off",
        ),
        pytest.param(
            [waiting("InvalidImageName")],
            (PROBLEM, "chat-0: InvalidImageName reg/x:1"),
            id="without a message",
        ),
        pytest.param(
            [
                waiting("ImagePullBackOff", "Back-off"),
                waiting("ErrImagePull", "dial tcp: refused", name="chat-1"),
            ],
            (PROBLEM, "chat-0, chat-1: ErrImagePull reg/x:1: dial tcp: refused"),
            id="two pods of one image, with the longest message",
        ),
    ],
)
def test_an_image_that_cannot_be_pulled_is_named(pods: list[Body], expected: tuple[Severity, str]) -> None:
    assert summarise(check_images(pods)) == expected


def test_a_crash_looping_container_is_a_warning() -> None:
    pods = [waiting("CrashLoopBackOff", restarts=5)]
    assert summarise(check_restarts(pods)) == (WARNING, "restarting repeatedly: chat-0 (5 restarts)")
    assert check_restarts([pod()]).severity is OK


def test_amounts_are_formatted_with_binary_units() -> None:
    assert [format_amount("memory", 2.0**34), format_amount("cpu", 0.25)] == ["16Gi memory", "0.25 cpu"]


# the router


def endpoint_slice(*addresses: str, ready: bool = True) -> Body:
    return {
        "endpoints": [{"addresses": list(addresses), "conditions": {"ready": ready}}] if addresses else None
    }


def router_pod(address: str) -> Body:
    return {"metadata": {"name": "chat-router-x"}, "status": {"podIP": address}}


EMPTY = (PROBLEM, "EndpointSlice chat-router is empty: the Service chat has no endpoint")


@pytest.mark.parametrize(
    ("found", "pods", "expected"),
    [
        pytest.param(None, [], (PROBLEM, "EndpointSlice chat-router is missing"), id="absent"),
        pytest.param(endpoint_slice(), [], EMPTY, id="empty"),
        pytest.param(endpoint_slice("10.0.0.1", ready=False), [], EMPTY, id="not ready"),
        pytest.param(
            endpoint_slice("10.0.0.1"),
            [router_pod("10.0.0.1"), router_pod("10.0.0.2")],
            (OK, "the Service chat leads to 10.0.0.1"),
            id="the active router",
        ),
        pytest.param(
            endpoint_slice("10.0.0.9"),
            [router_pod("10.0.0.1")],
            (PROBLEM, "the Service chat leads to 10.0.0.9, which is not the address of a running router"),
            id="a router that was deleted",
        ),
    ],
)
def test_the_endpoint_slice_must_hold_a_running_router(
    found: Body | None, pods: list[Body], expected: tuple[Severity, str]
) -> None:
    assert summarise(check_endpoints("chat", found, pods)) == expected


def test_the_worst_finding_gives_the_severity() -> None:
    assert worst_severity([]) is OK
    assert (
        worst_severity(
            [
                Finding(CheckId.TIERS, OK, ""),
                Finding(CheckId.MODEL, PROBLEM, ""),
                Finding(CheckId.PAIRS, WARNING, ""),
            ]
        )
        is PROBLEM
    )
