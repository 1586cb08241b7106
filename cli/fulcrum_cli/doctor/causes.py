"""One cause, one problem: what only follows from another finding is named below it, and that comes first."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from fulcrum_cli.doctor.findings import Finding, Severity
from fulcrum_cli.doctor.services import bad_conditions, explain_impossible_floors
from fulcrum_core.api import conditions
from fulcrum_core.api.pdservice import PDService

_PROBLEM = Severity.PROBLEM
FindingKey = tuple[str, str]
"""The service that a finding is about, and the finding's name."""

_OPERATOR_CHECKS = ("operator's pods", "operator", "leader")
"""Each of these is why the next one is bad."""
_AUTOSCALER_CHECKS = ("autoscaler's pods", "autoscaler")
_SAME_CHECKS = tuple(zip(_OPERATOR_CHECKS, _AUTOSCALER_CHECKS, strict=False))
"""Where the same is to be done for both parts, one of them is told."""
_CHECKS_OF_UNOBSERVED_SERVICE = (
    *("status", "conditions", "progress", "instances", "floors", "serving instances", "pods", "pairs"),
    *("router", "router's lease", "endpoints", "router's permissions"),
)
"""Bad of a service that no operator has ever looked at."""
_CAUSES_OF_NOT_SERVING = ("images", "nodes", "model", "instances")
_NOT_SERVING_REASONS = {
    *(
        conditions.TOO_FEW_INSTANCES,
        conditions.ROUTER_STARTING,
        conditions.IMAGE_PULL_FAILED,
        conditions.UNSCHEDULABLE,
    ),
    *(
        conditions.ENGINE_START_FAILED,
        conditions.INSTANCES_FAILED,
        conditions.INSTANCE_LOST,
        conditions.NODE_LOST,
    ),
}
"""Reasons of conditions that only say that instances do not serve."""
_ROUTER_CHECKS = ("router", "router's lease", "endpoints")


def group_by_cause(
    findings: Iterable[Finding], services: Iterable[PDService], *, routers_without_image: Collection[str] = ()
) -> tuple[Finding, ...]:
    """The findings, causes first, each with the names of those that follow from it.

    `routers_without_image` names the services whose routers' images do not come.
    """
    found, services = tuple(findings), tuple(services)
    for service in reversed(services):
        name = service.metadata.name
        routers = _ROUTER_CHECKS if name in routers_without_image else ()
        follows = {(name, each) for each in (*_consequences_of_not_serving(service), *routers)}
        found = _group_below_first(found, [(name, each) for each in _CAUSES_OF_NOT_SERVING], follows)
        if not service.status.observed_generation:
            made = {(name, each) for each in _CHECKS_OF_UNOBSERVED_SERVICE}
            found = _group_below_first(found, [(name, "status")], made)
    found = _group_below_first(found, _keys_without_service(_AUTOSCALER_CHECKS), {("", "autoscaler")})
    return _group_below_first(
        found, _keys_without_service(_OPERATOR_CHECKS), _consequences_of_operator(found, services)
    )


def _keys_without_service(names: Iterable[str]) -> list[FindingKey]:
    return [("", name) for name in names]


def _consequences_of_not_serving(service: PDService) -> list[str]:
    """What is bad of a service because its instances do not serve."""
    symptoms = ["serving instances", "progress"]
    if {condition.reason for condition in bad_conditions(service)} <= _NOT_SERVING_REASONS:
        symptoms.append("conditions")
    if explain_impossible_floors(service) is None:
        symptoms.append("floors")
    return symptoms


def _consequences_of_operator(findings: Iterable[Finding], services: Iterable[PDService]) -> set[FindingKey]:
    """What is bad because no operator works, among it the autoscaler where both lack the same thing."""
    follows = set(_keys_without_service(_OPERATOR_CHECKS))
    for service in services:
        made = ("status",) if service.status.observed_generation else _CHECKS_OF_UNOBSERVED_SERVICE
        follows |= {(service.metadata.name, each) for each in made}
    bad = {each.name: each.advice for each in findings if not each.service and each.severity is _PROBLEM}
    if any(one in bad and bad[one] == bad.get(other) for one, other in _SAME_CHECKS):
        follows |= set(_keys_without_service(_AUTOSCALER_CHECKS))
    return follows


def _group_below_first(
    findings: tuple[Finding, ...], causes: Iterable[FindingKey], follows: Collection[FindingKey]
) -> tuple[Finding, ...]:
    """The first of the causes that is a problem at the head, without what follows from it."""
    bad = {(each.service, each.name): each for each in findings if each.severity is _PROBLEM}
    cause = next((bad[title] for title in causes if title in bad), None)
    if cause is None:
        return findings
    below = [
        each
        for each in findings
        if each is not cause and (each.service, each.name) in follows and each.severity is not Severity.OK
    ]
    consequences = (
        *(each.title for each in below),
        *(title for each in below for title in each.consequences),
    )
    rest = (each for each in findings if each is not cause and each not in below)
    return (replace(cause, consequences=(*cause.consequences, *consequences)), *rest)
