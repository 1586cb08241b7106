"""Doctor's checks of one service, and `examine`: findings of a whole cluster or run, grouped by cause."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_cli.commands.doctor import format_findings
from fulcrum_cli.doctor.examine import examine
from fulcrum_cli.doctor.facts import ClusterFacts, DoctorFacts, LocalFacts
from fulcrum_cli.doctor.findings import Component, Finding, Severity, worst_severity
from fulcrum_cli.doctor.permissions import USER_PERMISSIONS, AccessReview
from fulcrum_cli.doctor.routing import check_router_responds, check_serving_instances
from fulcrum_cli.doctor.services import (
    PROGRESS_DEADLINE_S,
    check_conditions,
    check_floors,
    check_instances,
    check_model,
    check_pairs,
    check_progress,
    check_status_is_current,
    check_tiers,
)
from fulcrum_core.api.meta import Condition, format_time
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance, PDInstanceStatus
from fulcrum_core.api.pdservice import PDService, PDServiceStatus
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Phase, Role
from tests.objects import make_object
from tests.unit.core.router_states import instance_state, router_state

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM
NOW_S = 1_700_000_000.0


def summarise(finding: Finding) -> tuple[Severity, str]:
    return finding.severity, finding.observed


def service(
    *conditions: Condition, generation: int = 3, observed_generation: int = 3, age_s: float = 60, **spec: Any
) -> PDService:
    found = make_object(PDService, "chat", {"model": "m", "instances": 2, **spec})
    times = {"generation": generation, "creation_timestamp": NOW_S - age_s}
    status = PDServiceStatus(conditions=conditions, observed_generation=observed_generation)
    return found.replace(metadata=found.metadata.model_copy(update=times), status=status)


def condition(kind: str, status: str, *, message: str = "", since_s: float = 0.0) -> Condition:
    fields = {
        "type": kind,
        "status": status,
        "reason": "R",
        "message": message,
        "lastTransitionTime": NOW_S - since_s,
    }
    return Condition.model_validate(fields)


def instance(name: str, phase: str = "Serving", role: str | None = "Prefill", **identity: Any) -> PDInstance:
    spec = {"service": "chat", "pool": "flex", "model": "m", "engine": {}}
    found = make_object(PDInstance, name, spec)
    known = {
        "model": "m",
        "engine": "e:1",
        "kvDtype": "f16",
        "blockSize": 16,
        "tensorParallel": 1,
        **identity,
    }
    fields = {"phase": phase, "role": role, "endpoint": "192.0.2.1:8000", "identity": known}
    return found.replace(status=PDInstanceStatus.model_validate(fields))


def assignment(**roles: str) -> PDAssignment:
    entries = {
        name.replace("_", "-"): {"role": role, "since": "2026-01-01T00:00:00Z", "by": "Operator"}
        for name, role in roles.items()
    }
    return make_object(PDAssignment, "chat", {"service": "chat", "roles": entries})


P, D = instance("chat-0"), instance("chat-1", role="Decode")
PAIR = assignment(chat_0="Prefill", chat_1="Decode")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(service(), (OK, "of generation 3, the current one"), id="current"),
        pytest.param(
            service(observed_generation=2),
            (WARNING, "of generation 2, the spec is of generation 3"),
            id="behind",
        ),
        pytest.param(
            service(observed_generation=0),
            (PROBLEM, "of generation 0, the spec is of generation 3: no operator has reconciled it"),
            id="never reconciled",
        ),
        pytest.param(
            service(observed_generation=0, age_s=1),
            (WARNING, "of generation 0, the spec is of generation 3"),
            id="just created",
        ),
    ],
)
def test_a_status_of_an_older_generation_is_reported(
    found: PDService, expected: tuple[Severity, str]
) -> None:
    assert summarise(check_status_is_current(found, now_s=NOW_S)) == expected


def test_tiers_that_are_missing_are_named() -> None:
    named = service(qosTiers=["gold", "free"])
    assert summarise(check_tiers(named, {"gold"})) == (PROBLEM, "QoSTier not found: free")
    assert summarise(check_tiers(named, {"gold", "free"})) == (OK, "all 2 named tiers exist")
    assert summarise(check_tiers(service(), ())) == (OK, "the service uses none: spec.qosTiers is empty")


THREE = [{"name": "flex", "instances": {"min": 3}}]
POOLS = [
    {"name": "p", "role": "Prefill", "instances": {"min": 2}},
    {"name": "d", "role": "Decode", "instances": {"min": 1}},
]


@pytest.mark.parametrize(
    ("found", "instances", "expected"),
    [
        pytest.param(service(), (P, D), (OK, "at least 1 Prefill and 1 Decode"), id="met"),
        pytest.param(
            service(),
            (P, instance("chat-1", "Starting", None)),
            (PROBLEM, "0 of 1 needed Decode instances serve"),
            id="not met now",
        ),
        pytest.param(
            service(instances=None, pools=THREE, roles={"prefill": {"min": 2}, "decode": {"min": 2}}),
            (P, D),
            (PROBLEM, "floors of 2 and 2 need more than the maximum of 3 instances"),
            id="more than the maximum",
        ),
        pytest.param(
            service(instances=None, pools=POOLS, roles={"decode": {"min": 2}}),
            (P, D),
            (PROBLEM, "spec.roles.decode.min is 2, but only 1 instance can decode"),
            id="more than the pools allow",
        ),
        pytest.param(
            service(instances=1),
            (instance("chat-0", role="Both"),),
            (OK, "at least 1 Prefill and 1 Decode"),
            id="a single instance serves both roles",
        ),
    ],
)
def test_floors_that_cannot_or_do_not_hold_are_a_problem(
    found: PDService, instances: tuple[PDInstance, ...], expected: tuple[Severity, str]
) -> None:
    assert summarise(check_floors(found, instances, PAIR)) == expected


def test_failed_instances_are_reported_with_their_message() -> None:
    failed = P.replace(
        status=P.status.model_copy(update={"phase": Phase.FAILED, "message": "its engine ended"})
    )
    assert summarise(check_instances("chat", (failed, D))) == (PROBLEM, "chat-0: its engine ended")
    assert summarise(check_instances("chat", ())) == (PROBLEM, "there are none")
    assert summarise(check_instances("chat", (P, D))) == (OK, "none has failed, 2 of 2 serve")


OTHER_ENGINE = instance("chat-1", role="Decode", engine="e:2")
ENGINE_MISMATCH = "engine differs: prefill has e:1, decode has e:2"


@pytest.mark.parametrize(
    ("instances", "roles", "expected"),
    [
        pytest.param(
            (P, D), PAIR, (OK, "1 pair of the assigned roles, none incompatible"), id="equal engines"
        ),
        pytest.param(
            (P, OTHER_ENGINE),
            PAIR,
            (
                PROBLEM,
                f"1 of 1 pair of the assigned roles cannot exchange KV; chat-0 → chat-1: {ENGINE_MISMATCH}",
            ),
            id="no compatible pair",
        ),
        pytest.param(
            (P, OTHER_ENGINE, instance("chat-2", role="Decode")),
            assignment(chat_0="Prefill", chat_1="Decode", chat_2="Decode"),
            (
                WARNING,
                f"1 of 2 pairs of the assigned roles cannot exchange KV; chat-0 → chat-1: {ENGINE_MISMATCH}",
            ),
            id="one compatible pair",
        ),
        pytest.param(
            (instance("chat-0", tensorParallel=2), D),
            assignment(chat_0="Decode", chat_1="Prefill"),
            (OK, "1 pair of the assigned roles, none incompatible"),
            id="compatible in the direction that is used",
        ),
        pytest.param(
            (instance("chat-0", tensorParallel=2), D),
            assignment(chat_1="Prefill"),
            (OK, "1 pair of the assigned roles, none incompatible"),
            id="an instance without a role decodes for one that prefills",
        ),
        pytest.param(
            (P, D.replace(status=D.status.model_copy(update={"identity": None}))),
            PAIR,
            (WARNING, "unknown for chat-1: no identity in its status yet"),
            id="no identity yet",
        ),
    ],
)
def test_pairs_that_cannot_exchange_kv_are_reported_with_the_reason(
    instances: tuple[PDInstance, ...], roles: PDAssignment, expected: tuple[Severity, str]
) -> None:
    assert summarise(check_pairs("chat", instances, roles)) == expected


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        pytest.param((), (OK, "nothing is changing"), id="no condition yet"),
        pytest.param(
            (condition("Progressing", "False", message="settled"),),
            (OK, "settled"),
            id="settled",
        ),
        pytest.param(
            (condition("Progressing", "True", message="1 of 2", since_s=60),),
            (OK, "1 of 2; for 1m"),
            id="within the deadline",
        ),
        pytest.param(
            (condition("Progressing", "True", message="1 of 2", since_s=PROGRESS_DEADLINE_S + 60),),
            (PROBLEM, "1 of 2; for 11m"),
            id="beyond the deadline",
        ),
    ],
)
def test_a_change_beyond_its_deadline_is_a_problem(
    conditions: tuple[Condition, ...], expected: tuple[Severity, str]
) -> None:
    assert summarise(check_progress(service(*conditions), now_s=NOW_S)) == expected


def test_bad_conditions_are_reported() -> None:
    bad = condition("Degraded", "True", message="chat-0: its engine ended")
    fine = condition("Ready", "True", message="all serve")
    assert summarise(check_conditions(service(bad, fine))) == (
        PROBLEM,
        "Degraded is True (R): chat-0: its engine ended",
    )
    missed = condition("SLOMet", "False", message="93.1 % of 400 requests")
    assert check_conditions(service(fine, missed)).severity is PROBLEM
    assert check_conditions(service(fine)).severity is OK
    assert check_conditions(service()).severity is WARNING


def test_a_service_without_serving_instances_is_a_problem() -> None:
    starting = instance("chat-0", "Starting", None)
    assert summarise(check_serving_instances("chat", (starting,))) == (
        PROBLEM,
        "the router has no instance to send requests to: chat-0 Starting",
    )
    assert check_serving_instances("chat", (P, D)).severity is OK


def state(*, missed_probes: int = 0) -> RouterState:
    return router_state(instance_state("chat-0", Role.PREFILL, missed_probes=missed_probes))


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        pytest.param(None, (PROBLEM, "it does not respond"), id="no response"),
        pytest.param(state(), (OK, "responds, and reaches 1 instance"), id="a response"),
        pytest.param(
            state(missed_probes=3), (WARNING, "cannot reach chat-0"), id="an engine does not respond"
        ),
    ],
)
def test_a_local_router_that_does_not_respond_is_a_problem(
    router: RouterState | None, expected: tuple[Severity, str]
) -> None:
    assert summarise(check_router_responds("chat", router)) == expected


# all at once

HEALTHY_CONDITIONS = (
    condition("Ready", "True", message="2 of 2"),
    condition("Progressing", "False", message="settled"),
)


def facts(**changes: Any) -> DoctorFacts:
    given: dict[str, Any] = {
        "now_s": NOW_S,
        "namespace": "n",
        "services": (service(*HEALTHY_CONDITIONS),),
        "instances": (P, D),
        "assignments": {"chat": PAIR},
        "tiers": frozenset(),
    }
    return DoctorFacts(**{**given, **changes})


def test_a_healthy_local_run_has_only_ok_findings() -> None:
    findings = examine(facts(local=LocalFacts(state=state(), autoscaler_error="")))
    assert worst_severity(findings) is OK
    assert format_findings(findings)[-1] == "12 ok, 0 warnings, 0 problems"


def test_a_namespace_without_a_service_is_ok() -> None:
    findings = examine(facts(services=(), instances=(), assignments={}))
    assert [finding.observed for finding in findings] == ["no PDService in namespace n"]


def cluster_without_permissions() -> ClusterFacts:
    """Return the facts that a user without permissions can read."""
    return ClusterFacts(
        crds=None,
        user_access=tuple(AccessReview(permission, False) for permission in USER_PERMISSIONS),
        service_accounts=(),
        operator_deployments=None,
        autoscaler_deployments=None,
        component_pods={},
        operator_lease=None,
        leases_readable=False,
        nodes=None,
        engine_pods=None,
        router_pods=None,
        router_deployments=None,
        router_leases=None,
        endpoint_slices=None,
    )


def test_missing_permissions_are_the_only_problem() -> None:
    findings = examine(
        facts(services=(), instances=(), assignments={}, cluster=cluster_without_permissions())
    )
    assert [(finding.check, finding.severity) for finding in findings] == [
        ("CRDs", WARNING),
        ("your permissions", PROBLEM),
        ("operator", WARNING),
        ("autoscaler", WARNING),
    ]


def test_every_problem_and_warning_says_what_to_do() -> None:
    findings = examine(
        facts(
            services=(service(observed_generation=0, qosTiers=["gold"]),),
            instances=(),
            cluster=cluster_without_permissions(),
        )
    )
    assert [finding.check for finding in findings if finding.severity is not OK and not finding.advice] == []
    assert all(finding.advice == "" for finding in findings if finding.severity is OK)


# one cause


def in_cluster(**changes: Any) -> ClusterFacts:
    """Return a cluster with readable, empty lists of the services' objects; nothing else can be read."""
    empty: dict[str, Any] = {
        "router_deployments": {},
        "router_leases": {},
        "endpoint_slices": {},
        "engine_pods": {},
        "nodes": [],
    }
    return replace(
        cluster_without_permissions(), **{**empty, "user_access": (), "router_pods": {}, **changes}
    )


def deployment(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "f"}, "spec": {"replicas": 1}, "status": {}}


def pulling(name: str, image: str, message: str = "refused") -> dict[str, Any]:
    waiting = {"reason": "ErrImagePull", "message": message}
    status = {"containerStatuses": [{"image": image, "state": {"waiting": waiting}}]}
    return {"metadata": {"name": name}, "spec": {"nodeName": "n1"}, "status": status}


def problems_of(findings: Sequence[Finding]) -> list[tuple[str, Severity, str]]:
    return [(each.title, *summarise(each)) for each in findings if each.severity is PROBLEM]


def test_an_operator_without_its_image_is_the_only_problem_of_a_new_installation() -> None:
    cluster = in_cluster(
        operator_deployments=[deployment("op")],
        autoscaler_deployments=[deployment("auto")],
        component_pods={
            Component.OPERATOR: [pulling("op-x", "f:1")],
            Component.AUTOSCALER: [pulling("auto-x", "f:1")],
        },
        leases_readable=True,
    )
    findings = examine(
        facts(services=(service(observed_generation=0),), instances=(), assignments={}, cluster=cluster)
    )
    assert problems_of(findings) == [("operator's pods", PROBLEM, "op-x: ErrImagePull f:1: refused")]
    assert set(findings[0].consequences) == {
        *("operator", "leader", "autoscaler's pods", "autoscaler"),
        *("chat: status", "chat: conditions", "chat: instances", "chat: floors", "chat: serving instances"),
        *("chat: router", "chat: router's lease", "chat: endpoints"),
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"operator_deployments": [], "autoscaler_deployments": []},
            ["operator"],
            id="neither is installed",
        ),
        pytest.param(
            {"operator_deployments": [deployment("op")], "autoscaler_deployments": [deployment("auto")]},
            ["operator", "autoscaler"],
            id="neither is ready, without a common cause",
        ),
        pytest.param(
            {
                "autoscaler_deployments": [deployment("auto")],
                "component_pods": {
                    Component.OPERATOR: None,
                    Component.AUTOSCALER: [pulling("auto-x", "f:1")],
                },
            },
            ["autoscaler's pods"],
            id="only the autoscaler lacks its image",
        ),
    ],
)
def test_operator_and_autoscaler_are_grouped_only_for_the_same_cause(
    changes: Mapping[str, Any], expected: list[str]
) -> None:
    cluster = in_cluster(**changes, leases_readable=True)
    findings = examine(facts(services=(), instances=(), assignments={}, cluster=cluster))
    assert [title for title, *_ in problems_of(findings)] == expected


def test_an_engine_image_that_cannot_be_pulled_is_the_only_problem_of_its_service() -> None:
    ready = condition("Ready", "False").model_copy(update={"reason": "TooFewInstances"})
    degraded = condition("Degraded", "True").model_copy(update={"reason": "ImagePullFailed"})
    message = "failed to resolve reference: " + "x" * 400 + ": no such host"
    router = {
        "metadata": {"name": "chat-router", "namespace": "n"},
        "spec": {},
        "status": {"readyReplicas": 1},
    }
    lease = {
        "metadata": {"name": "chat-router", "namespace": "n"},
        "spec": {"holderIdentity": "r", "renewTime": format_time(NOW_S)},
    }
    cluster = in_cluster(
        engine_pods={"chat": [pulling("chat-0", "vllm:9", message)]},
        router_deployments={"chat": [router]},
        router_leases={"chat": lease},
        endpoint_slices={"chat": {"endpoints": [{"addresses": ["10.0.0.1"]}]}},
    )
    starting = (instance("chat-0", "Starting", None), instance("chat-1", "Starting", None))
    findings = examine(
        facts(services=(service(ready, degraded),), instances=starting, assignments={}, cluster=cluster)
    )
    assert problems_of(findings) == [("chat: images", PROBLEM, f"chat-0: ErrImagePull vllm:9: {message}")]
    assert findings[0].consequences == ("chat: conditions", "chat: floors", "chat: serving instances")
    assert (
        "         explains also: chat: conditions, chat: floors, chat: serving instances"
        in format_findings(findings)
    )


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param("True", (OK, "fits, R: 13 requests"), id="it fits"),
        pytest.param("Unknown", (OK, "unknown whether it fits, R: 13 requests"), id="unknown"),
        pytest.param("False", (PROBLEM, "does not fit, R: 13 requests"), id="it does not"),
    ],
)
def test_the_condition_model_fits_is_reported(status: str, expected: tuple[Severity, str]) -> None:
    assert summarise(check_model(service(condition("ModelFits", status, message="13 requests")))) == expected


def test_simulated_engines_need_no_model_fit() -> None:
    none = condition("ModelFits", "Unknown", message="simulated engines load no model")
    finding = check_model(service(none.model_copy(update={"reason": "NotApplicable"})))
    assert summarise(finding) == (OK, "simulated engines load no model")


def test_a_model_that_does_not_fit_explains_instances_that_do_not_serve() -> None:
    large = condition("ModelFits", "False", message="131.4 GiB of weights")
    ready = condition("Ready", "False").model_copy(update={"reason": "TooFewInstances"})
    starting = (instance("chat-0", "Starting", None), instance("chat-1", "Starting", None))
    findings = examine(facts(services=(service(ready, large),), instances=starting, assignments={}))
    assert problems_of(findings)[0] == ("chat: model", PROBLEM, "does not fit, R: 131.4 GiB of weights")
    assert findings[0].consequences == ("chat: conditions", "chat: floors", "chat: serving instances")


def test_findings_with_a_cause_of_their_own_stay_separate() -> None:
    broken = service(condition("TiersAccepted", "False"), qosTiers=["gold"])
    cluster = in_cluster(engine_pods={"chat": [pulling("chat-0", "vllm:9")]})
    found = [title for title, *_ in problems_of(examine(facts(services=(broken,), cluster=cluster)))]
    assert found[0] == "chat: images"
    assert {"chat: conditions", "chat: tiers"} <= set(found)


def test_a_service_that_was_never_reconciled_is_the_cause_where_the_operator_cannot_be_examined() -> None:
    findings = examine(
        facts(services=(service(observed_generation=0),), instances=(), assignments={}, cluster=in_cluster())
    )
    assert [title for title, *_ in problems_of(findings)] == ["chat: status"]
