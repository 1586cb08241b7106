"""Turns a simulated run into states of the live page, one a second, so that the page can replay it. Pure.

Instances, assignment and traffic are built as the page observes those of a running service. The work of an
instance comes from the times of its requests: what the router predicted then is not kept.

The command `simulate` writes them with `web.recording`.
"""

import math
from collections.abc import Iterator
from typing import Any

from fulcrum_cli.simulation.page_requests import PageRequests
from fulcrum_cli.web.decision_log import DecisionLog
from fulcrum_cli.web.page_model import PageObservation, build_page
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.values import Actor, AutoscalingMode, Phase, Role
from fulcrum_simulator.fleet.flip import SimulatedFlip
from fulcrum_simulator.fleet.options import FLIPPING, PLANNED, PolicyName
from fulcrum_simulator.fleet.run import RunResult

INTERVAL_S = 1.0
STATES_MAX = 7_200
"""A longer run has its states farther apart."""
_CHANGING = FLIPPING | PLANNED | {PolicyName.XLLM}
"""Policies that change roles."""
_SERVICE, _POOL = "simulated", "fleet"


def build_states(result: RunResult, *, load: str) -> Iterator[dict[str, Any]]:
    """Yield the states of a run from its start to its end; their times count from the start."""
    fleet, requests = _SimulatedObjects(result), PageRequests(result)
    step_s = max(INTERVAL_S, result.end_s / STATES_MAX)
    for number in range(math.floor(result.end_s / step_s) + 1):
        now_s = number * step_s
        fleet.advance(now_s)
        requests.advance(now_s)
        observation = PageObservation(
            service=fleet.service,
            instances=fleet.instances,
            assignment=fleet.assignment,
            reading=requests.read_loads(fleet.roles),
            traffic=requests.read_traffic(),
            decisions=fleet.log.list(),
            source=f"simulated run of {load}, policy {result.options.policy}",
        )
        state = build_page(observation, now_s=now_s)
        if result.options.service is None:
            state["slo"]["attained"] = None  # the command has no such objective
        yield state


class _SimulatedObjects:
    """The objects of a run, with the flips so far."""

    def __init__(self, result: RunResult) -> None:
        options, engine = result.options, {"type": "Simulated"}
        launch = {"model": options.profile.name, "engine": engine}
        slo: dict[str, Any] = {"ttft": f"{options.slo.ttft_s:g}s", "tpot": f"{options.slo.tpot_s:g}s"}
        if options.service is not None:
            slo["attainment"] = options.service.slo.attainment
        mode = AutoscalingMode.AUTO if options.policy.name in _CHANGING else AutoscalingMode.OFF
        service = {
            "metadata": {"name": _SERVICE},
            "spec": {**launch, "instances": options.instances, "slo": slo, "autoscaling": {"mode": mode}},
        }
        self.service = PDService.model_validate(service)
        self.instances = {
            name: PDInstance.model_validate(
                {
                    "metadata": {"name": name},
                    "spec": {**launch, "service": _SERVICE, "pool": _POOL},
                    "status": {"phase": Phase.SERVING},
                }
            )
            for name in result.first_roles
        }
        self.roles = dict(result.first_roles)
        """Assigned role by instance; all Both if no role is assigned."""
        self.log = DecisionLog()
        self._flips, self._made = result.flips, 0
        self._entries = {
            name: _make_entry(role, 0.0, Actor.OPERATOR, "first split")
            for name, role in self.roles.items()
            if role is not Role.BOTH
        }
        self.assignment = self._assign()

    def advance(self, now_s: float) -> None:
        """Apply the flips up to a time."""
        for flip in self._take_flips(now_s):
            role = Role(flip.to)
            self.roles[flip.instance] = role
            self._entries[flip.instance] = _make_entry(role, flip.at_s, Actor.AUTOSCALER, flip.reason)
            self.assignment = self._assign()

    def _take_flips(self, now_s: float) -> Iterator[SimulatedFlip]:
        while self._made < len(self._flips) and self._flips[self._made].at_s <= now_s:
            self._made += 1
            yield self._flips[self._made - 1]

    def _assign(self) -> PDAssignment:
        spec = {"service": _SERVICE, "roles": self._entries, "flips": self._made}
        assignment = PDAssignment.model_validate({"metadata": {"name": _SERVICE}, "spec": spec})
        self.log.record_assignment(assignment)
        return assignment


def _make_entry(role: Role, at_s: float, by: Actor, reason: str) -> dict[str, Any]:
    return {"role": role, "since": at_s, "by": by, "reason": reason[:1024]}
