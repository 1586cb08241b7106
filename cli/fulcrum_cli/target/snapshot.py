"""Reads all that is known of one service at one time, for `status` and `explain`.

`connection` makes the requests. What could not be read is None; nothing is judged.
"""

from dataclasses import dataclass
from typing import Any

from fulcrum_cli.target.connection import TargetConnection
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.router_state import InstanceState, RouterState
from fulcrum_operator.plan.slo_window import MIN_REQUESTS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSnapshot:
    """A service with its instances and roles. `state` is set only for a local run whose router responds."""

    service: PDService
    instances: tuple[PDInstance, ...]
    assignment: PDAssignment | None
    state: RouterState | None = None

    @property
    def attainment(self) -> float | None:
        """Requests that met TTFT and TPOT, in per cent.

        Of all requests if the router's state is known, else of those in `slo.window`, by the status.
        """
        if self.state is None:
            percent = self.service.status.attainment
            return None if percent is None else float(percent)
        return attainment_percent(self.state)

    def dump(self) -> dict[str, Any]:
        """Return the document for programs; its fields have the names that the CRDs give them."""
        meta = self.service.metadata
        loads = {load.name: load for load in self.state.instances} if self.state else {}
        instances = [
            {"name": name, "status": i.status.dump(), "load": _dump_load(loads.get(name))}
            for i in self.instances
            for name in [i.metadata.name]
        ]
        return {
            "name": meta.name,
            "namespace": meta.namespace,
            "generation": meta.generation,
            "model": self.service.spec.model,
            "status": self.service.status.dump(),
            "assignment": self.assignment.spec.dump() if self.assignment else None,
            "instances": instances,
            "attainment": self.attainment,
        }


def _dump_load(load: InstanceState | None) -> dict[str, Any] | None:
    return load.model_dump(mode="json") if load else None


def attainment_percent(state: RouterState | None) -> float | None:
    """Return the requests that met TTFT and TPOT, in per cent of all that ended, by the router's count.

    As in the live view, requests in flight do not count yet, and cancelled requests never count.
    None if fewer have ended than the condition SLOMet requires for a figure.
    """
    ended = sum(tier.ended for tier in state.tiers) if state else 0
    if state is None or ended < MIN_REQUESTS:
        return None
    return round(100 * sum(tier.slo_met for tier in state.tiers) / ended, 1)


async def read_snapshot(connection: TargetConnection, service: PDService) -> ServiceSnapshot:
    """Read instances, assignment and router state of the service."""
    listed = (await connection.store.list(PDInstance, namespace=connection.namespace)).items
    name = service.metadata.name
    assignments = (await connection.store.list(PDAssignment, namespace=connection.namespace)).items
    return ServiceSnapshot(
        service=service,
        instances=tuple(instance for instance in listed if instance.spec.service == name),
        assignment=next((found for found in assignments if found.metadata.name == name), None),
        state=await connection.router_state(),
    )
