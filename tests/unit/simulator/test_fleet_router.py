"""The simulated router learns from its legs as the shipped one does."""

import random

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Role, Slo
from fulcrum_simulator.fleet.event_queue import EventQueue
from fulcrum_simulator.fleet.instance import InstanceOptions, SimulatedInstance
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.routed_instance import RoutedInstance
from fulcrum_simulator.fleet.router import SimulatedRouter
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import WorkloadRequest

WRONG = PrefillModel(c0=0.0, c1=1e-5, c2=0.0)
"""Much too fast."""


def build_router(events: EventQueue, *, decode: int = 1, lookahead_steps: int = 1) -> SimulatedRouter:
    """Return a router with a prefill instance `p` and decode instances `d0` on.

    It expects the prompts on all of them to take almost no time.
    """
    profile = load_profile("laptop")
    engines = InstanceOptions(profile=profile, step_noise=0.0, lookahead_steps=lookahead_steps)
    peers: dict[str, SimulatedInstance] = {}
    decode_model: DecodeModel = profile.step_model.decode_model(1_000)
    views = [
        RoutedInstance(
            SimulatedInstance(name, engines, events, peers, random.Random(1)), role, WRONG, decode_model
        )
        for name, role in {"p": Role.PREFILL, **{f"d{n}": Role.DECODE for n in range(decode)}}.items()
    ]
    return SimulatedRouter(events, views, slo=Slo(1.0, 0.05), hop_s=0.001, flips=None)


def test_all_prompts_of_a_queue_are_learned_from() -> None:
    events = EventQueue()
    router = build_router(events)
    ended: list[int] = []
    for number in range(20):
        record = RequestResult(WorkloadRequest(0.0, 600, 1))
        router.serve(record, number, lambda number=number: ended.append(number))  # type: ignore[misc]
    while len(ended) < 20:
        events.run_next()
    samples, _ = router.fleet["p"].samples
    truth = load_profile("laptop").step_model.prefill_model(load_profile("laptop").token_budget)
    predicted_s = router.fleet["p"].prefill_model.ttft_s(600)
    assert samples == 3  # of eight, eight and four responses
    assert abs(predicted_s / truth.ttft_s(600) - 1) < 0.2


def test_only_the_rest_of_an_answer_is_computed_after_its_engine_failed() -> None:
    events = EventQueue()
    router = build_router(events, decode=2)
    ended: list[RequestResult] = []
    record = RequestResult(WorkloadRequest(0.0, 600, 100))
    router.serve(record, 0, lambda: ended.append(record))
    first, second = (router.fleet.routed_by_name[name] for name in ("d0", "d1"))
    while first.record.ledger.decode_tokens < 600 + 40:
        events.run_next()
        router.advance()
    router.set_serving(first, False)
    first.instance.fail(1_000.0)
    while not ended:
        events.run_next()
    assert record.outcome is Outcome.OK
    computed = [view.instance.engine.stats.generation_tokens for view in (first, second)]
    assert sum(computed) == 100, computed


def test_a_probe_reads_the_kv_use_after_steps_that_were_skipped() -> None:
    events = EventQueue()
    router = build_router(events, lookahead_steps=1_000)
    router.start_probes()
    router.serve(RequestResult(WorkloadRequest(0.5, 600, 400)), 0, lambda: None)
    while not router.samples:
        events.run_next()
    view = router.fleet.routed_by_name["d0"]
    assert view.record.kv_usage == view.instance.engine.kv_usage > 0
