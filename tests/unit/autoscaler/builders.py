"""Builders of the autoscaler policy's input, of which a test gives only the values that it depends on.

Also the one fake of `ServiceObjects`, the port of the autoscaler's loop.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fulcrum_autoscaler.policy import AutoscalingRules, Observation
from fulcrum_core.api import PDAssignment, PDInstance, PDPool, PDService
from fulcrum_core.api.pdassignment import Floors, PDAssignmentSpec, RoleAssignment
from fulcrum_core.assignment import AssignmentRules
from fulcrum_core.router_state import FlipRequest, InstanceState, RouterState
from fulcrum_core.values import Actor, AutoscalingMode, FlipPolicy, Role, Slo
from tests.unit.core.router_states import instance_state, router_state

NOW_S = 1_000_000.0
LONG_AGO_S = NOW_S - 1000


def prefill(name: str, queued_s: float = 0.0, **numbers: Any) -> InstanceState:
    """Build a serving prefill instance with this much queued prefill work."""
    return instance_state(name, Role.PREFILL, prefill_queued_s=queued_s, **numbers)


def decode(name: str, itl_s: float | None = None, tokens: int = 1000, **numbers: Any) -> InstanceState:
    """Build a serving decode instance with one request of this many tokens in its KV cache."""
    return instance_state(
        name, Role.DECODE, **{"itl_s": itl_s, "decode_tokens": tokens, "decode_legs": 1, **numbers}
    )


def make_router_state(*instances: InstanceState, **fields: Any) -> RouterState:
    """Build a router state with these instances at `NOW_S`; generation 1 was acknowledged long ago."""
    return router_state(*instances, **{"acknowledged_at_s": LONG_AGO_S, "at_s": NOW_S, **fields})


def entry(role: Role, **fields: Any) -> RoleAssignment:
    """Build an assignment entry that the operator wrote long ago."""
    return RoleAssignment(role=role, **{"since": LONG_AGO_S, "by": Actor.OPERATOR, **fields})


def assignment(roles: Mapping[str, RoleAssignment], **fields: Any) -> PDAssignmentSpec:
    """Build the assignment of the service `chat`, with floors of 1."""
    return PDAssignmentSpec(service="chat", roles=dict(roles), **fields)


def make_observation(*instances: InstanceState, **fields: Any) -> Observation:
    """Build an observation in which each instance serves and its assigned role is its current role."""
    roles = {i.name: entry(i.role) for i in instances}
    default: dict[str, Any] = {
        "assignment": assignment(roles),
        "generation": 1,
        "serving_by_phase": frozenset(roles),
        "router": make_router_state(*instances),
    }
    return Observation(**{**default, **fields})


def make_rules(**fields: Any) -> AutoscalingRules:
    """Build rules of Arrow: TTFT 1 s, TPOT 100 ms, flip at the first tick, cooldown 10 s."""
    default: dict[str, Any] = {
        "mode": AutoscalingMode.AUTO,
        "policy": FlipPolicy.ARROW,
        "paused": False,
        "slo": Slo(ttft_s=1.0, tpot_s=0.1),
        "expand": 1.0,
        "shrink": 0.5,
        "consecutive_ticks": 1,
        "interval_s": 1.0,
        "assignment_rules": AssignmentRules(prefill_to_decode_cooldown_s=10.0),
        "deflects": False,
    }
    return AutoscalingRules(**{**default, **fields})


def make_flip_request(role: Role, reason: str = "predicted TTFT 1.4 s") -> FlipRequest:
    """Build the router's first flip request."""
    return FlipRequest(seq=1, role=role, reason=reason)


__all__ = [
    "Floors",
    "assignment",
    "decode",
    "entry",
    "make_flip_request",
    "make_observation",
    "make_router_state",
    "make_rules",
    "prefill",
]


class FakeServiceObjects:
    """`ServiceObjects` that the test sets. As with a real watch, they may be older than the store."""

    def __init__(self) -> None:
        self.the_service: PDService | None = None
        self.the_assignment: PDAssignment | None = None
        self.the_instances: list[PDInstance] = []
        self.the_pools: list[PDPool] = []

    def service(self) -> PDService | None:
        return self.the_service

    def assignment(self) -> PDAssignment | None:
        return self.the_assignment

    def instances(self) -> Iterable[PDInstance]:
        return self.the_instances

    def pools(self) -> Iterable[PDPool]:
        return self.the_pools
