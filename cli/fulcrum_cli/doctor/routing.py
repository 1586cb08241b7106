"""Does the router of a service take requests, and has it somewhere to send them?"""

from collections.abc import Sequence

from fulcrum_cli.doctor.facts import Body
from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.spelling import format_count
from fulcrum_core.state import RouterState
from fulcrum_core.values import Phase


def check_endpoints(service: str, endpoint_slice: Body | None, router_pods: Sequence[Body]) -> Finding:
    """Whether the Service leads to a router: the active one writes itself into the EndpointSlice."""
    name = "endpoints"
    if endpoint_slice is None:
        advice = "the operator makes it: see the operator's findings"
        return problem(name, f"EndpointSlice {service}-router is not there", advice, about=service)
    ready = [
        address
        for endpoint in endpoint_slice.get("endpoints") or ()
        if (endpoint.get("conditions") or {}).get("ready", True)
        for address in endpoint.get("addresses", ())
    ]
    if not ready:
        seen = f"EndpointSlice {service}-router is empty: nobody answers at the Service {service}"
        return problem(
            name, seen, "no router is active: see the router's pods, Lease and rights", about=service
        )
    alive = {pod.get("status", {}).get("podIP") for pod in router_pods}
    if router_pods and not alive.intersection(ready):
        seen = f"the Service {service} leads to {', '.join(ready)}, which is no router that lives"
        return problem(
            name, seen, "no router has taken over: see the router's Lease and rights", about=service
        )
    return ok(name, f"the Service {service} leads to {', '.join(ready)}", about=service)


def check_somewhere(service: str, instances: Sequence[PDInstance]) -> Finding:
    """Whether the router has an instance to send requests to."""
    serving = [i for i in instances if i.status.phase is Phase.SERVING and i.status.endpoint]
    if serving:
        told = format_count(len(serving), "instance serves", "instances serve")
        return ok("targets", told, about=service)
    phases = ", ".join(f"{i.metadata.name} {i.status.phase}" for i in instances) or "there are none"
    seen = f"the router has no instance to send requests to: {phases}"
    return problem("targets", seen, "see why the instances do not serve", about=service)


def check_router_answers(service: str, state: RouterState | None) -> Finding:
    """In a local run: whether the router answers, and reaches its engines."""
    if state is None:
        return problem("router", "it does not answer", "see router.log in the run's folder", about=service)
    silent = [i.name for i in state.instances if i.missed_probes > 1]
    if silent:
        seen = f"it does not reach {', '.join(silent)}"
        return warning(
            "router", seen, "the engine hangs or starts: see its log in the run's folder", about=service
        )
    reached = format_count(len(state.instances), "instance")
    return ok("router", f"answers, and reaches {reached}", about=service)


def check_autoscaler_answers(service: str, refusal: str) -> Finding:
    """In a local run: whether the autoscaler answers; `refusal` is "" if it does."""
    if refusal:
        return problem("autoscaler", refusal, "see autoscaler.log in the run's folder", about=service)
    return ok("autoscaler", "answers", about=service)
