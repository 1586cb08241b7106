"""Doctor's checks of what stands around the services: kinds, rights, programs, nodes, images, routers."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fulcrum_cli.doctor.findings import Finding, Standing, worst
from fulcrum_cli.doctor.gather import account_of, in_charge
from fulcrum_cli.doctor.placement import check_images, check_nodes, check_restarts
from fulcrum_cli.doctor.programs import check_deployment, check_lease
from fulcrum_cli.doctor.quantities import parse_quantity, spell
from fulcrum_cli.doctor.rights import AUTOSCALER, PERSON, Answer, Need, check_account, check_person
from fulcrum_cli.doctor.routing import check_endpoints
from fulcrum_cli.doctor.schemas import check_kinds
from fulcrum_core.api.crds import crd
from fulcrum_core.api.meta import format_time
from fulcrum_core.api.registry import KINDS

OK, WARNING, PROBLEM = Standing.OK, Standing.WARNING, Standing.PROBLEM
NOW_S = 1_700_000_000.0
Body = dict[str, Any]


def seen(finding: Finding) -> tuple[Standing, str]:
    return finding.standing, finding.seen


# the kinds

OURS = {f"{kind.plural}.fulcrum.dev": crd(kind) for kind in KINDS}
SERVICES = "pdservices.fulcrum.dev"


def stored(**changes: Any) -> dict[str, Any]:
    """The kinds as they are, but for PDService: `lacks` a field, `has` one more, `rule` differs."""
    kinds = copy.deepcopy(OURS)
    spec = kinds[SERVICES]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    if field := changes.get("lacks"):
        del spec["properties"][field]
    if field := changes.get("has"):
        spec["properties"][field] = {"type": "object", "properties": {"inner": {"type": "string"}}}
    if maximum := changes.get("maximum"):
        spec["properties"]["instances"]["maximum"] = maximum
    if words := changes.get("description"):
        spec["description"] = words
    if "established" in changes:
        status = "True" if changes["established"] else "False"
        kinds[SERVICES]["status"] = {"conditions": [{"type": "Established", "status": status}]}
    return {name: None if name == changes.get("without") else body for name, body in kinds.items()}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        pytest.param(
            stored(), (OK, "all 5 kinds are there, as this program knows them"), id="as they shall be"
        ),
        pytest.param(
            stored(description="other words", established=True),
            (OK, "all 5 kinds are there, as this program knows them"),
            id="other descriptions only",
        ),
        pytest.param(stored(without=SERVICES), (PROBLEM, f"missing: {SERVICES}"), id="one is missing"),
        pytest.param(
            stored(lacks="drain"),
            (PROBLEM, f"older than this program: {SERVICES} has no spec.drain"),
            id="older",
        ),
        pytest.param(
            stored(has="later"),
            (
                WARNING,
                f"newer than this program: {SERVICES} has spec.later, which this program does not know",
            ),
            id="newer",
        ),
        pytest.param(stored(maximum=7), (WARNING, f"{SERVICES} has other rules"), id="another rule"),
        pytest.param(
            stored(established=False),
            (WARNING, f"{SERVICES} is not established yet"),
            id="not established",
        ),
    ],
)
def test_kinds_are_compared_field_by_field(kinds: Mapping[str, Any], expected: tuple[Standing, str]) -> None:
    assert seen(check_kinds(kinds, OURS)) == expected


# rights


def answers(needs: Sequence[Need], *, refused: int = 0, unknown: bool = False) -> tuple[Answer, ...]:
    """The last `refused` of the needs are refused."""
    allowed = len(needs) - refused
    return tuple(Answer(need, None if unknown else at < allowed) for at, need in enumerate(needs))


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        pytest.param(
            check_person(answers(PERSON), namespace="n"),
            (OK, "you may look at and change what is in namespace n"),
            id="a person who may do all",
        ),
        pytest.param(
            check_person(answers(PERSON, refused=2), namespace="n"),
            (WARNING, "in namespace n you may not patch pdassignments.fulcrum.dev, get services/proxy"),
            id="a person who may only look",
        ),
        pytest.param(
            check_person((Answer(PERSON[0], False),), namespace="n"),
            (PROBLEM, "in namespace n you may not list pdservices.fulcrum.dev"),
            id="a person who may not even look",
        ),
        pytest.param(
            check_account("autoscaler", "f/a", answers(AUTOSCALER)),
            (OK, "ServiceAccount f/a may do what it has to"),
            id="an account that may do all",
        ),
        pytest.param(
            check_account("autoscaler", "f/a", answers(AUTOSCALER, refused=1)),
            (PROBLEM, "ServiceAccount f/a may not patch pdassignments.fulcrum.dev"),
            id="an account with a gap",
        ),
        pytest.param(
            check_account("router", "f/a", answers(AUTOSCALER, unknown=True)),
            (WARNING, "not looked at: you may not ask for ServiceAccount f/a"),
            id="an account not to be asked for",
        ),
    ],
)
def test_rights_that_are_missing_are_named(finding: Finding, expected: tuple[Standing, str]) -> None:
    assert seen(finding) == expected


# programs


def deployment(ready: int, replicas: int = 2, *conditions: Body) -> Body:
    return {
        "metadata": {"name": "fulcrum-operator", "namespace": "f"},
        "spec": {"replicas": replicas},
        "status": {"readyReplicas": ready, "conditions": list(conditions)},
    }


LATE = {"type": "Progressing", "status": "False", "message": "deadline exceeded"}
WHERE = "Deployment f/fulcrum-operator"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(None, (WARNING, "not looked at: you may not list Deployments"), id="nobody could look"),
        pytest.param([], (PROBLEM, "no Deployment of the operator is there"), id="absent"),
        pytest.param([deployment(2)], (OK, f"{WHERE}: 2 of 2 replicas ready"), id="ready"),
        pytest.param([deployment(0)], (PROBLEM, f"{WHERE}: 0 of 2 replicas ready"), id="none ready"),
        pytest.param(
            [deployment(0, 0)], (PROBLEM, f"{WHERE}: 0 of 0 replicas ready"), id="scaled to nothing"
        ),
        pytest.param(
            [deployment(0, 1, LATE)],
            (PROBLEM, f"{WHERE}: 0 of 1 replica ready: deadline exceeded"),
            id="late, with its reason",
        ),
        pytest.param(
            [deployment(2), deployment(1)],
            (WARNING, f"{WHERE}: 1 of 2 replicas ready"),
            id="one of two Deployments is not whole",
        ),
    ],
)
def test_a_program_that_does_not_run_is_a_problem(
    found: list[Body] | None, expected: tuple[Standing, str]
) -> None:
    assert seen(check_deployment("operator", found, advice_absent="install it")) == expected


def test_a_deployment_with_a_standby_missing_still_works() -> None:
    assert check_deployment("router", [deployment(1)], advice_absent="").standing is WARNING


def lease(holder: str | None, age_s: float) -> Body:
    spec = {"holderIdentity": holder, "renewTime": format_time(NOW_S - age_s), "leaseDurationSeconds": 15}
    return {"metadata": {"name": "fulcrum-operator", "namespace": "f"}, "spec": spec}


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param(None, (PROBLEM, "its Lease is not there"), id="absent"),
        pytest.param(lease(None, 0), (PROBLEM, "nobody holds Lease f/fulcrum-operator"), id="given back"),
        pytest.param(lease("o-1", 14), (OK, "o-1 holds Lease f/fulcrum-operator"), id="held"),
        pytest.param(
            lease("o-1", 90),
            (
                PROBLEM,
                "Lease f/fulcrum-operator of o-1 was last renewed 1m30s ago and ran out after 15s",
            ),
            id="stale",
        ),
    ],
)
def test_a_lease_that_nobody_renews_is_a_problem(held: Body | None, expected: tuple[Standing, str]) -> None:
    assert seen(check_lease("leader", held, now_s=NOW_S, advice="")) == expected


def installed(namespace: str, *args: str) -> Body:
    pods = {"spec": {"serviceAccountName": "sa", "containers": [{"args": list(args)}]}}
    return {"metadata": {"name": "op", "namespace": namespace}, "spec": {"template": pods}}


FOR_ALL, FOR_N, FOR_OTHERS = (
    installed("f"),
    installed("g", "--namespace=n"),
    installed("h", "--namespace", "o"),
)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        pytest.param([FOR_ALL, FOR_N, installed("n")], [installed("n")], id="the one installed there"),
        pytest.param([FOR_ALL, FOR_N, FOR_OTHERS], [FOR_N], id="the one for it alone"),
        pytest.param([FOR_ALL, FOR_OTHERS], [FOR_ALL], id="the one for all"),
        pytest.param([FOR_OTHERS], [], id="none is for it"),
    ],
)
def test_of_several_installations_the_one_in_charge_is_looked_at(
    there: list[Body], expected: list[Body]
) -> None:
    assert in_charge(there, "n") == expected
    assert account_of(FOR_ALL) == ("f", "sa")


# nodes and images


def pod(name: str = "chat-0", *, waits: str | None = None, **spec: Any) -> Body:
    requests = spec.pop("requests", {"cpu": "2", "memory": "8Gi"})
    conditions = [{"type": "PodScheduled", "status": "False", "message": waits}] if waits is not None else []
    placed = {} if waits is not None else {"nodeName": "n1"}
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
PENDING = pod(waits="0/1 nodes are available")
WAITS = "no node fits chat-0: 0/1 nodes are available"


@pytest.mark.parametrize(
    ("pods", "nodes", "expected", "advice"),
    [
        pytest.param([pod(), pod("chat-1")], [], (OK, "2 of 2 pods on a node"), "", id="all placed"),
        pytest.param([PENDING], None, (PROBLEM, WAITS), "could not be looked at", id="nodes not to be seen"),
        pytest.param([PENDING], [], (PROBLEM, WAITS), "there is no node: add one", id="no node at all"),
        pytest.param(
            [PENDING],
            [node(cpu="1")],
            (PROBLEM, f"{WAITS}; it asks for 2 cpu, the most that a node has is 1 cpu"),
            "add nodes of that size",
            id="too big for every node",
        ),
        pytest.param(
            [pod(waits="0/1 nodes are available", requests={"nvidia.com/gpu": "4"})],
            [node()],
            (PROBLEM, f"{WAITS}; it asks for 4 nvidia.com/gpu, the most that a node has is 0 nvidia.com/gpu"),
            "add nodes of that size",
            id="a device that no node has",
        ),
        pytest.param(
            [PENDING],
            [node("n1", GPU)],
            (PROBLEM, WAITS),
            "tolerate gpu=yes:NoSchedule (node n1)",
            id="a taint",
        ),
        pytest.param(
            [pod(waits="0/1 nodes are available", tolerations=[{"key": "gpu", "operator": "Exists"}])],
            [node("n1", GPU)],
            (PROBLEM, WAITS),
            "are full",
            id="a taint that is tolerated",
        ),
        pytest.param(
            [PENDING],
            [node("n1", unschedulable=True)],
            (PROBLEM, WAITS),
            "kubectl uncordon",
            id="cordoned",
        ),
        pytest.param([PENDING], [node()], (PROBLEM, WAITS), "are full", id="big enough and full"),
    ],
)
def test_a_pod_without_a_node_is_told_with_the_reason(
    pods: list[Body], nodes: list[Body] | None, expected: tuple[Standing, str], advice: str
) -> None:
    finding = check_nodes(pods, nodes)
    assert seen(finding) == expected
    assert advice in finding.advice


def waiting(reason: str, message: str = "", *, restarts: int = 0, name: str = "chat-0") -> Body:
    state = {"waiting": {"reason": reason, "message": message}}
    status = {"image": "reg/x:1", "state": state, "restartCount": restarts}
    return {"metadata": {"name": name}, "spec": {}, "status": {"containerStatuses": [status]}}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([pod()], (OK, "no pod of 1 waits for its image"), id="none waits"),
        pytest.param(
            [waiting("ContainerCreating")],
            (OK, "no pod of 1 waits for its image"),
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
            id="two of one image, by the words that say most",
        ),
    ],
)
def test_an_image_that_does_not_come_is_named(pods: list[Body], expected: tuple[Standing, str]) -> None:
    assert seen(check_images(pods)) == expected


def test_a_container_that_ends_again_and_again_is_a_warning() -> None:
    pods = [waiting("CrashLoopBackOff", restarts=5)]
    assert seen(check_restarts(pods)) == (WARNING, "ended again and again: chat-0 (5 restarts)")
    assert check_restarts([pod()]).standing is OK


@pytest.mark.parametrize(
    ("text", "number"),
    [("250m", 0.25), ("2", 2), (4, 4), ("16Gi", 2**34), ("1.5k", 1500), ("1e3", 1000), ("100n", 1e-7)],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: str | int, number: float) -> None:
    assert parse_quantity(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "x", "1Q", "1 Gi"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        parse_quantity(text)


def test_amounts_are_spelled_for_people() -> None:
    assert [spell("memory", 2.0**34), spell("cpu", 0.25)] == ["16Gi memory", "0.25 cpu"]


# the router


def endpoint_slice(*addresses: str, ready: bool = True) -> Body:
    return {
        "endpoints": [{"addresses": list(addresses), "conditions": {"ready": ready}}] if addresses else None
    }


def router_pod(address: str) -> Body:
    return {"metadata": {"name": "chat-router-x"}, "status": {"podIP": address}}


EMPTY = (PROBLEM, "EndpointSlice chat-router is empty: nobody answers at the Service chat")


@pytest.mark.parametrize(
    ("found", "pods", "expected"),
    [
        pytest.param(None, [], (PROBLEM, "EndpointSlice chat-router is not there"), id="absent"),
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
            (PROBLEM, "the Service chat leads to 10.0.0.9, which is no router that lives"),
            id="a router that is gone",
        ),
    ],
)
def test_a_service_has_to_lead_to_a_router_that_lives(
    found: Body | None, pods: list[Body], expected: tuple[Standing, str]
) -> None:
    assert seen(check_endpoints("chat", found, pods)) == expected


def test_the_worst_finding_is_the_verdict() -> None:
    assert worst([]) is OK
    assert worst([Finding("a", OK, ""), Finding("b", PROBLEM, ""), Finding("c", WARNING, "")]) is PROBLEM
