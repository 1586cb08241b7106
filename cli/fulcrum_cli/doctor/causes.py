"""Groups findings by cause: a finding that only follows from another is listed as its consequence.

Findings that are causes come first in the report, so that one cause is one problem. `examine` calls it last,
with the findings of all checks.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from fulcrum_cli.doctor.findings import CheckId, Finding, Severity
from fulcrum_cli.doctor.services import bad_conditions, explain_impossible_floors
from fulcrum_core.api import conditions
from fulcrum_core.api.pdservice import PDService

_PROBLEM = Severity.PROBLEM
FindingKey = tuple[str, CheckId]
"""Service of a finding ("" if it is not about a service), and its check."""

_OPERATOR_CHECKS = (CheckId.OPERATOR_PODS, CheckId.OPERATOR, CheckId.LEADER)
"""Checks of the operator in causal order: each explains the next."""
_AUTOSCALER_CHECKS = (CheckId.AUTOSCALER_PODS, CheckId.AUTOSCALER)
_SAME_CHECKS = tuple(zip(_OPERATOR_CHECKS, _AUTOSCALER_CHECKS, strict=False))
"""Checks of operator and autoscaler that are reported once if both fail for the same cause."""
_ROUTER_CHECKS = (CheckId.ROUTER, CheckId.ROUTER_LEASE, CheckId.ENDPOINTS)
_CHECKS_OF_UNOBSERVED_SERVICE = (
    CheckId.STATUS,
    CheckId.CONDITIONS,
    CheckId.PROGRESS,
    CheckId.INSTANCES,
    CheckId.FLOORS,
    CheckId.SERVING_INSTANCES,
    CheckId.PODS,
    CheckId.PAIRS,
    *_ROUTER_CHECKS,
    CheckId.ROUTER_PERMISSIONS,
)
"""Checks that fail for a service that no operator has reconciled yet."""
_CAUSES_OF_NOT_SERVING = (CheckId.IMAGES, CheckId.NODES, CheckId.MODEL, CheckId.INSTANCES)
_NOT_SERVING_REASONS = frozenset(
    {
        conditions.TOO_FEW_INSTANCES,
        conditions.ROUTER_STARTING,
        conditions.IMAGE_PULL_FAILED,
        conditions.UNSCHEDULABLE,
        conditions.ENGINE_START_FAILED,
        conditions.INSTANCES_FAILED,
        conditions.INSTANCE_LOST,
        conditions.NODE_LOST,
    }
)
"""Reasons of conditions that follow from instances that do not serve."""


def group_by_cause(
    findings: Iterable[Finding], services: Iterable[PDService], *, routers_without_image: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Return the findings, causes first, each with the titles of its consequences.

    `routers_without_image` names the services whose routers' images cannot be pulled.
    """
    found, services = tuple(findings), tuple(services)
    for service in reversed(services):
        name = service.metadata.name
        routers = _ROUTER_CHECKS if name in routers_without_image else ()
        follows = {(name, check) for check in (*_consequences_of_not_serving(service), *routers)}
        found = _group_below_first(found, [(name, check) for check in _CAUSES_OF_NOT_SERVING], follows)
        if not service.status.observed_generation:
            unobserved = {(name, check) for check in _CHECKS_OF_UNOBSERVED_SERVICE}
            found = _group_below_first(found, [(name, CheckId.STATUS)], unobserved)
    found = _group_below_first(found, _keys_without_service(_AUTOSCALER_CHECKS), {("", CheckId.AUTOSCALER)})
    return _group_below_first(
        found, _keys_without_service(_OPERATOR_CHECKS), _consequences_of_operator(found, services)
    )


def _keys_without_service(checks: Iterable[CheckId]) -> list[FindingKey]:
    return [("", check) for check in checks]


def _consequences_of_not_serving(service: PDService) -> list[CheckId]:
    """List the checks of a service that fail because its instances do not serve."""
    checks = [CheckId.SERVING_INSTANCES, CheckId.PROGRESS]
    if {condition.reason for condition in bad_conditions(service)} <= _NOT_SERVING_REASONS:
        checks.append(CheckId.CONDITIONS)
    if explain_impossible_floors(service) is None:
        checks.append(CheckId.FLOORS)
    return checks


def _consequences_of_operator(findings: Iterable[Finding], services: Iterable[PDService]) -> set[FindingKey]:
    """Return the checks that fail without a working operator.

    The autoscaler's checks are among them if operator and autoscaler fail for the same cause.
    """
    follows = set(_keys_without_service(_OPERATOR_CHECKS))
    for service in services:
        checks = (CheckId.STATUS,) if service.status.observed_generation else _CHECKS_OF_UNOBSERVED_SERVICE
        follows |= {(service.metadata.name, check) for check in checks}
    causes = {each.check: each.cause for each in findings if each.severity is _PROBLEM and each.cause}
    if any(ours in causes and causes[ours] is causes.get(other) for ours, other in _SAME_CHECKS):
        follows |= set(_keys_without_service(_AUTOSCALER_CHECKS))
    return follows


def _group_below_first(
    findings: tuple[Finding, ...], causes: Iterable[FindingKey], follows: Collection[FindingKey]
) -> tuple[Finding, ...]:
    """Move the first of `causes` that is a problem to the front, and the findings in `follows` below it."""
    problems = {(each.service, each.check): each for each in findings if each.severity is _PROBLEM}
    cause = next((problems[key] for key in causes if key in problems), None)
    if cause is None:
        return findings
    below = [
        each
        for each in findings
        if each is not cause and (each.service, each.check) in follows and each.severity is not Severity.OK
    ]
    consequences = (
        *(each.title for each in below),
        *(title for each in below for title in each.consequences),
    )
    rest = (each for each in findings if each is not cause and each not in below)
    return (replace(cause, consequences=(*cause.consequences, *consequences)), *rest)
