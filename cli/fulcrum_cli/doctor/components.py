"""Checks of the Deployments, pods and Leases that operator, autoscaler and routers run with.

`examine` calls them with the facts. The pods of routers are not checked here but in `examine`, together with
those of the engines.
"""

from collections.abc import Sequence
from dataclasses import replace

from fulcrum_cli.doctor import pod_checks
from fulcrum_cli.doctor.facts import Body
from fulcrum_cli.doctor.findings import Cause, CheckId, Component, Finding, Severity, ok, problem, warning
from fulcrum_cli.terminal.output import format_age
from fulcrum_core.api.meta import format_duration, parse_time
from fulcrum_core.formatting import format_count


def check_deployment(
    component: Component, found: Sequence[Body] | None, *, advice_absent: str, service: str = ""
) -> Finding:
    """Check that a component has a Deployment with all replicas ready.

    `found` is None without permission to list Deployments.
    """
    check = component.deployment_check
    if found is None:
        advice = "run this as a user with permission to list Deployments in its namespace"
        return warning(check, "skipped: no permission to list Deployments", advice, service=service)
    if not found:
        return problem(
            check,
            f"the {component} has no Deployment",
            advice_absent,
            service=service,
            cause=Cause.NOT_INSTALLED,
        )
    readiness = [_describe_readiness(body) for body in found]
    bad = [text for severity, text in readiness if severity is not Severity.OK]
    if any(severity is Severity.PROBLEM for severity, _ in readiness):
        return problem(check, "; ".join(bad), _advise_describe(found[0]), service=service)
    if bad:
        return warning(check, "; ".join(bad), _advise_describe(found[0]), service=service)
    return ok(check, "; ".join(text for _, text in readiness), service=service)


def check_pods(component: Component, pods: Sequence[Body], nodes: Sequence[Body] | None) -> Finding:
    """Check images, nodes and restarts of the operator's or the autoscaler's pods.

    Returns the first finding that is not OK.
    """
    findings = (
        pod_checks.check_images(pods, image_setting="the chart's image"),
        pod_checks.check_nodes(pods, nodes),
        pod_checks.check_restarts(pods),
    )
    found = next((finding for finding in findings if finding.severity is not Severity.OK), None)
    if found is None:
        return ok(
            component.pods_check, f"all {len(pods)} have their image and a node, and none restarts repeatedly"
        )
    return replace(found, check=component.pods_check)


def _describe_readiness(body: Body) -> tuple[Severity, str]:
    """Return OK if all replicas are ready, else WARNING, and PROBLEM if none is; with a description.

    A Deployment that is scaled to 0 is a problem.
    """
    meta, status = body["metadata"], body.get("status", {})
    desired, ready = body["spec"].get("replicas", 1), status.get("readyReplicas", 0)
    text = (
        f"Deployment {meta['namespace']}/{meta['name']}: {ready} of {format_count(desired, 'replica')} ready"
    )
    if ready >= desired > 0:
        return Severity.OK, text
    failing = [
        condition.get("message", condition["type"])
        for condition in status.get("conditions", ())
        if (condition["type"], condition["status"]) in _FAILING_CONDITIONS
    ]
    return (
        Severity.WARNING if ready else Severity.PROBLEM,
        f"{text}{': ' if failing else ''}{'; '.join(failing)}",
    )


_FAILING_CONDITIONS = {("ReplicaFailure", "True"), ("Progressing", "False")}


def _advise_describe(body: Body) -> str:
    meta = body["metadata"]
    return f"kubectl -n {meta['namespace']} describe deployment {meta['name']}; then see the log of its pods"


def check_lease(
    check: CheckId, lease: Body | None, *, now_s: float, advice: str, service: str = ""
) -> Finding:
    """Check that a Lease has a holder and was renewed in time.

    `check` is LEADER for the operator's Lease and ROUTER_LEASE for a router's; the autoscaler has none.
    """
    if lease is None:
        return problem(check, "the Lease is missing", advice, service=service)
    spec, meta = lease.get("spec", {}), lease["metadata"]
    lease_name, holder = f"Lease {meta['namespace']}/{meta['name']}", spec.get("holderIdentity")
    if not holder or not spec.get("renewTime"):
        return problem(check, f"{lease_name} has no holder", advice, service=service)
    since_renewal_s = max(0.0, now_s - parse_time(spec["renewTime"]))
    lease_duration_s = float(spec.get("leaseDurationSeconds", 15))
    if since_renewal_s > lease_duration_s:
        ago, after = format_age(since_renewal_s), format_duration(lease_duration_s)
        observed = f"{lease_name} of {holder} was last renewed {ago} ago and expired after {after}"
        return problem(check, observed, advice, service=service)
    return ok(check, f"{holder} holds {lease_name}", service=service)
