"""Does the router of a service take requests, and has it somewhere to send them?"""

from collections.abc import Sequence

from fulcrum_cli.doctor.facts import Body
from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.formatting import format_count
from fulcrum_core.router_state import RouterState


def check_endpoints(service: str, endpoint_slice: Body | None, router_pods: Sequence[Body]) -> Finding:
    """Whether the Service leads to a router: the active one writes itself into the EndpointSlice."""
    name = "endpoints"
    if endpoint_slice is None:
        advice = "the operator makes it: see the operator's findings"
        return problem(name, f"EndpointSlice {service}-router is not there", advice, service=service)
    ready = [
        address
        for endpoint in endpoint_slice.get("endpoints") or ()
        if (endpoint.get("conditions") or {}).get("ready", True)
        for address in endpoint.get("addresses", ())
    ]
    if not ready:
        observed = f"EndpointSlice {service}-router is empty: nobody answers at the Service {service}"
        return problem(
            name, observed, "no router is active: see the router's pods, Lease and rights", service=service
        )
    router_addresses = {pod.get("status", {}).get("podIP") for pod in router_pods}
    if router_pods and not router_addresses.intersection(ready):
        observed = f"the Service {service} leads to {', '.join(ready)}, which is no router that lives"
        return problem(
            name, observed, "no router has taken over: see the router's Lease and rights", service=service
        )
    return ok(name, f"the Service {service} leads to {', '.join(ready)}", service=service)


def check_serving_instances(service: str, instances: Sequence[PDInstance]) -> Finding:
    """Whether the router has an instance to send requests to."""
    serving = [i for i in instances if i.is_serving and i.status.endpoint]
    if serving:
        observed = format_count(len(serving), "instance serves", "instances serve")
        return ok("serving instances", observed, service=service)
    phases = ", ".join(f"{i.metadata.name} {i.status.phase}" for i in instances) or "there are none"
    observed = f"the router has no instance to send requests to: {phases}"
    return problem("serving instances", observed, "see why the instances do not serve", service=service)


def check_router_responds(service: str, state: RouterState | None) -> Finding:
    """In a local run: whether the router answers, and reaches its engines."""
    if state is None:
        return problem("router", "it does not answer", "see router.log in the run's folder", service=service)
    unreachable = [i.name for i in state.instances if i.missed_probes > 1]
    if unreachable:
        observed = f"it does not reach {', '.join(unreachable)}"
        return warning(
            "router", observed, "the engine hangs or starts: see its log in the run's folder", service=service
        )
    reached = format_count(len(state.instances), "instance")
    return ok("router", f"answers, and reaches {reached}", service=service)


def check_autoscaler_responds(service: str, error: str) -> Finding:
    """In a local run: whether the autoscaler answers; `error` is "" if it does."""
    if error:
        return problem("autoscaler", error, "see autoscaler.log in the run's folder", service=service)
    return ok("autoscaler", "answers", service=service)
