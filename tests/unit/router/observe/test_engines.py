"""What probes find out about engines: latency, the longest context, deaths."""

import asyncio
import math
import time

import pytest

from fulcrum_core.values import Role
from fulcrum_router.counters import PREFILL
from fulcrum_router.fleet.engine_metrics import read_context_tokens
from fulcrum_router.fleet.instances import Fleet, Instance
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.observe.engines import MISSED_PROBES_TO_EJECT, EngineProber, LatencySums
from fulcrum_router.policy.kv_pairs.pair_record import PairKey, TransferOutcome
from fulcrum_router.policy.prefix_index import PromptPrefix
from fulcrum_router.router import Router
from tests.unit.router.builders import make_serving


@pytest.mark.parametrize(
    ("before", "now", "mean"),
    [
        pytest.param(LatencySums(1.0, 10), LatencySums(2.0, 30), 0.05, id="mean since the last read"),
        pytest.param(None, LatencySums(2.0, 30), None, id="first read"),
        pytest.param(LatencySums(2.0, 30), LatencySums(2.0, 30), None, id="no tokens since"),
        pytest.param(LatencySums(2.0, 30), LatencySums(0.5, 3), None, id="engine restarted"),
    ],
)
def test_mean_itl_covers_only_the_tokens_since_the_last_read(
    before: LatencySums | None, now: LatencySums, mean: float | None
) -> None:
    assert now.mean_since(before) == (None if mean is None else pytest.approx(mean))


@pytest.mark.parametrize(
    ("page", "tokens"),
    [
        pytest.param(b'{"data": [{"id": "m", "max_model_len": 8192}]}', 8192, id="a model"),
        pytest.param(
            b'{"data": [{"id": "adapter", "max_model_len": null}, {"max_model_len": 4096}]}',
            4096,
            id="an adapter, which names no length",
        ),
        pytest.param(b'{"data": [{"max_model_len": true}, {"max_model_len": 0}]}', None, id="no length"),
        pytest.param(b'{"data": {"max_model_len": 1}}', None, id="no list"),
        pytest.param(
            b'{"data": [{"max_model_len": 1000000000000000000}, {"max_model_len": 8192}]}',
            8192,
            id="more than any prompt has",
        ),
        pytest.param(b"[]", None, id="no object"),
        pytest.param(b"not JSON", None, id="no JSON"),
        pytest.param(b"[" * 100_000, None, id="nested without end"),
    ],
)
def test_the_longest_context_is_that_of_the_models(page: bytes, tokens: int | None) -> None:
    assert read_context_tokens(page) == tokens


async def test_a_probe_task_that_has_ended_is_started_again() -> None:
    fleet = Fleet()
    fleet.add(Instance("d-0"))
    prober = EngineProber(fleet, on_ejection=lambda *_: None, on_death=lambda _: None)
    prober._sync_tasks()
    ended = prober._tasks["d-0"]
    ended.cancel()
    await asyncio.wait([ended])
    prober._sync_tasks()
    started = prober._tasks["d-0"]
    started.cancel()
    assert started is not ended


@pytest.mark.parametrize(("answered", "deaths"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("by", ["probes", "a leg"])
def test_an_engine_has_died_that_answered_and_refuses_connections(
    by: str, *, answered: bool, deaths: int
) -> None:
    """One that has never answered is not up yet."""
    router, instance = Router(), make_serving("p0", Role.PREFILL)
    router.fleet.add(instance)
    instance.answered_at_s = time.monotonic() if answered else None
    if by == "probes":
        prober = EngineProber(router.fleet, on_ejection=router.record_ejection, on_death=router.record_death)
        for _ in range(2):
            prober._record_missed_probe(
                instance, instance.require_connection_pool(), Failure.REFUSED, began_s=0.0
            )
    else:
        failed = LegFailed(Failure.REFUSED, "no connection", may_have_started=False)
        router.record_leg_failure(instance, PREFILL, failed)
    assert router.journeys.engine_deaths.count(time.monotonic()) == deaths


def test_probes_for_which_the_router_has_no_socket_eject_no_engine() -> None:
    router, instance = Router(), make_serving("d0", Role.DECODE)
    router.fleet.add(instance)
    prober = EngineProber(router.fleet, on_ejection=router.record_ejection, on_death=router.record_death)
    for _ in range(2 * MISSED_PROBES_TO_EJECT):
        prober._record_missed_probe(
            instance, instance.require_connection_pool(), Failure.NO_SOCKET, began_s=0.0
        )
    assert (instance.serving, instance.missed_probes) == (True, 0)


def test_an_engine_is_ejected_for_slow_metrics_only_after_some_probes_without_any_data() -> None:
    """An engine with hundreds of streams may take seconds for its metrics: ejecting it would end them all."""
    router, instance = Router(), make_serving("d0", Role.DECODE)
    router.fleet.add(instance)
    prober = EngineProber(router.fleet, on_ejection=router.record_ejection, on_death=router.record_death)
    pool = instance.require_connection_pool()

    def miss(*, sends: bool) -> bool:
        pool.last_streamed_s = 10.5 if sends else 9.5
        prober._record_missed_probe(instance, pool, Failure.TIMEOUT, began_s=10.0)
        return instance.serving

    assert all(miss(sends=True) for _ in range(2 * MISSED_PROBES_TO_EJECT))
    assert instance.answers_probes, "a late leg waits in its queue"
    assert [miss(sends=False) for _ in range(MISSED_PROBES_TO_EJECT)] == [True, True, False]


def test_a_death_that_a_probe_finds_ends_what_the_engine_knew() -> None:
    """The engine was started again before a leg or a second probe failed."""
    router, instance = Router(), make_serving("p0", Role.PREFILL)
    router.fleet.add(instance)
    pair = router.pairs[PairKey("p0", "d0")]
    pair.record(TransferOutcome.VERIFIED, now_s=0.0)
    router.journeys.set_prefix_aware(prefix_aware=True)
    index, prompt = router.journeys.prefix_index, PromptPrefix((11,), (300,))
    assert index is not None
    index.record(prompt, "p0", new_tokens=300, room_tokens=math.inf)
    index.report("p0", index.find_hits(prompt), prompt, cached_tokens=1)
    assert index.find_hits(prompt).tokens
    router.record_death(instance)
    assert not index.find_hits(prompt).tokens
    assert pair.estimate_wait_s(0.2, 0.1) == 0.2
