"""Findings, the results of doctor's checks: severity, what was observed and what to do about it.

The checks return them, `causes` groups them and the command prints them.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """Severity of a finding.

    A problem keeps something from working. A warning may do so, or the check could not be made.
    """

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class CheckId(StrEnum):
    """Names of the checks, as printed and as in JSON's `check`."""

    CRDS = "CRDs"
    USER_PERMISSIONS = "your permissions"
    OPERATOR = "operator"
    OPERATOR_PODS = "operator's pods"
    OPERATOR_PERMISSIONS = "operator's permissions"
    LEADER = "leader"
    AUTOSCALER = "autoscaler"
    AUTOSCALER_PODS = "autoscaler's pods"
    AUTOSCALER_PERMISSIONS = "autoscaler's permissions"
    SERVICES = "services"
    STATUS = "status"
    CONDITIONS = "conditions"
    PROGRESS = "progress"
    INSTANCES = "instances"
    FLOORS = "floors"
    TIERS = "tiers"
    MODEL = "model"
    PAIRS = "pairs"
    SERVING_INSTANCES = "serving instances"
    PODS = "pods"
    NODES = "nodes"
    IMAGES = "images"
    RESTARTS = "restarts"
    ROUTER = "router"
    ROUTER_LEASE = "router's lease"
    ROUTER_PERMISSIONS = "router's permissions"
    ENDPOINTS = "endpoints"
    KV_TRANSFER = "KV transfer"


class Cause(StrEnum):
    """Causes by which problems of operator and autoscaler are recognised as one."""

    NOT_INSTALLED = "NotInstalled"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    UNSCHEDULABLE = "Unschedulable"


class Component(StrEnum):
    """Deployments of Fulcrum, with the checks of each."""

    OPERATOR = "operator"
    AUTOSCALER = "autoscaler"
    ROUTER = "router"

    @property
    def deployment_check(self) -> CheckId:
        """Check of the component's Deployment."""
        return CheckId[self.name]

    @property
    def permissions_check(self) -> CheckId:
        """Check of the permissions of the component's ServiceAccount."""
        return CheckId[f"{self.name}_PERMISSIONS"]

    @property
    def pods_check(self) -> CheckId:
        """Check of the component's pods; those of a router belong to the checks of its service."""
        return CheckId.PODS if self is Component.ROUTER else CheckId[f"{self.name}_PODS"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. `service` is empty if the finding is not about one service."""

    check: CheckId
    severity: Severity
    observed: str
    advice: str = ""
    service: str = ""
    consequences: tuple[str, ...] = ()
    """Titles of findings that this finding explains; they are not reported on their own."""
    cause: Cause | None = None
    """Cause, if it may be shared with another component; not part of the output."""

    @property
    def title(self) -> str:
        """Service and check: `operator`, `chat: images`."""
        return f"{self.service}: {self.check}" if self.service else self.check.value

    def dump(self) -> dict[str, Any]:
        """Return the document for programs, without empty fields."""
        fields = asdict(self)
        return {
            "check": self.check.value,
            "severity": self.severity.value,
            **{
                field: fields[field]
                for field in ("service", "observed", "advice", "consequences")
                if fields[field]
            },
        }


def ok(check: CheckId, observed: str, *, service: str = "") -> Finding:
    """Make a finding of severity OK."""
    return Finding(check, Severity.OK, observed, "", service)


def warning(check: CheckId, observed: str, advice: str, *, service: str = "") -> Finding:
    """Make a finding of severity WARNING."""
    return Finding(check, Severity.WARNING, observed, advice, service)


def problem(
    check: CheckId, observed: str, advice: str, *, service: str = "", cause: Cause | None = None
) -> Finding:
    """Make a finding of severity PROBLEM."""
    return Finding(check, Severity.PROBLEM, observed, advice, service, cause=cause)


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """Return the worst severity of the findings; OK without any."""
    order = list(Severity)
    return max((finding.severity for finding in findings), key=order.index, default=Severity.OK)
