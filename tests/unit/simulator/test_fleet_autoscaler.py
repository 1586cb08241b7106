"""The simulated autoscaler handles flip requests as the shipped control loop does."""

import random

from fulcrum_core.latency import DecodeModel
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Role, Slo
from fulcrum_router.policy import Dispatch, DispatchReason, FlipProposal
from fulcrum_simulator.fleet.autoscaler import SimulatedAutoscaler
from fulcrum_simulator.fleet.event_queue import EventQueue
from fulcrum_simulator.fleet.instance import InstanceOptions, SimulatedInstance
from fulcrum_simulator.fleet.routed_instance import RoutedInstance
from fulcrum_simulator.fleet.router import SimulatedRouter
from tests.unit.autoscaler.builders import assignment, entry, make_rules

LEAST = Dispatch("p", DispatchReason.LEAST_COST, (0.0, 0.0))
ROLES = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


def build_router(events: EventQueue) -> SimulatedRouter:
    """Return a router with one prefill and two decode instances, all idle."""
    profile = load_profile("laptop")
    engines = InstanceOptions(profile=profile, step_noise=0.0, lookahead_steps=1)
    prefill_model = profile.step_model.prefill_model(profile.token_budget)
    decode_model: DecodeModel = profile.step_model.decode_model(1_000)
    peers: dict[str, SimulatedInstance] = {}
    views = [
        RoutedInstance(
            SimulatedInstance(name, engines, events, peers, random.Random(1)),
            role,
            prefill_model,
            decode_model,
        )
        for name, role in ROLES.items()
    ]
    return SimulatedRouter(events, views, slo=Slo(1.0, 0.1), hop_s=0.001, flips=None)


def test_a_refused_flip_request_does_not_hide_the_one_for_the_other_role() -> None:
    """The last prefill instance is never flipped. Two requests arrive during the pause after its refusal."""
    events = EventQueue()
    router = build_router(events)
    autoscaler = SimulatedAutoscaler(
        router,
        assignment({name: entry(role) for name, role in ROLES.items()}),
        make_rules(),
        serving=lambda: ROLES,
        state_age_s=0.01,
        flip_latency_s=0.02,
    )
    for role in (Role.DECODE, Role.PREFILL, Role.DECODE):
        router.ask_for_flip(FlipProposal(role, LEAST, "late"))
    while events.now_s < 0.5:
        events.run_next()
    assert (autoscaler.refused, [flip.to for flip in autoscaler.flips]) == (2, ["Prefill"])
