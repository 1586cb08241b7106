"""Checks of the parts that a request goes through: Service, router, serving instances.

In a local run also of the autoscaler. `examine` calls them; no request is sent.
"""

from collections.abc import Sequence

from fulcrum_cli.doctor.facts import Body
from fulcrum_cli.doctor.findings import CheckId, Finding, ok, problem, warning
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.formatting import format_count
from fulcrum_core.router_state import RouterState


def check_endpoints(service: str, endpoint_slice: Body | None, router_pods: Sequence[Body]) -> Finding:
    """Check that the Service leads to a running router: the active router writes the EndpointSlice."""
    check = CheckId.ENDPOINTS
    if endpoint_slice is None:
        advice = "the operator creates it: see the findings of the operator"
        return problem(check, f"EndpointSlice {service}-router is missing", advice, service=service)
    ready = [
        address
        for endpoint in endpoint_slice.get("endpoints") or ()
        if (endpoint.get("conditions") or {}).get("ready", True)
        for address in endpoint.get("addresses", ())
    ]
    if not ready:
        observed = f"EndpointSlice {service}-router is empty: the Service {service} has no endpoint"
        return problem(
            check,
            observed,
            "no router is active: see the router's pods, Lease and permissions",
            service=service,
        )
    router_addresses = {pod.get("status", {}).get("podIP") for pod in router_pods}
    if router_pods and not router_addresses.intersection(ready):
        observed = (
            f"the Service {service} leads to {', '.join(ready)}, which is not the address of a running router"
        )
        return problem(
            check,
            observed,
            "no router has taken over: see the router's Lease and permissions",
            service=service,
        )
    return ok(check, f"the Service {service} leads to {', '.join(ready)}", service=service)


def check_serving_instances(service: str, instances: Sequence[PDInstance]) -> Finding:
    """Check that the router has an instance to send requests to."""
    serving = [i for i in instances if i.is_serving and i.status.endpoint]
    if serving:
        observed = format_count(len(serving), "instance serves", "instances serve")
        return ok(CheckId.SERVING_INSTANCES, observed, service=service)
    phases = ", ".join(f"{i.metadata.name} {i.status.phase}" for i in instances) or "there are none"
    observed = f"the router has no instance to send requests to: {phases}"
    return problem(CheckId.SERVING_INSTANCES, observed, "see why the instances do not serve", service=service)


def check_router_responds(service: str, state: RouterState | None) -> Finding:
    """Check, in a local run, that the router responds and reaches its engines."""
    if state is None:
        return problem(
            CheckId.ROUTER, "it does not respond", "see router.log in the run's folder", service=service
        )
    unreachable = [i.name for i in state.instances if i.missed_probes > 1]
    if unreachable:
        observed = f"cannot reach {', '.join(unreachable)}"
        return warning(
            CheckId.ROUTER,
            observed,
            "the engine is starting or hangs: see its log in the run's folder",
            service=service,
        )
    reached = format_count(len(state.instances), "instance")
    return ok(CheckId.ROUTER, f"responds, and reaches {reached}", service=service)


def check_autoscaler_responds(service: str, error: str) -> Finding:
    """Check, in a local run, that the autoscaler responds; `error` is "" if it does."""
    if error:
        return problem(CheckId.AUTOSCALER, error, "see autoscaler.log in the run's folder", service=service)
    return ok(CheckId.AUTOSCALER, "responds", service=service)
