"""Requests in an engine by its own count, which includes those of other routers, in the router's state."""

import asyncio
import time
from dataclasses import dataclass, field

from fulcrum_core.router_state import InstanceState
from fulcrum_router.control.state_port import build_router_state
from tests.integration.router.fake_engines import (
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    run_router,
)
from tests.waiting import run_pending_tasks, wait_until


def counts(running: int, waiting: int) -> bytes:
    return b"vllm:num_requests_running %d\nvllm:num_requests_waiting %d\n" % (running, waiting)


def instance_state(world: RunningRouter) -> InstanceState:
    (state,) = build_router_state(world.router, now_s=0.0).instances
    return state


async def test_requests_of_another_router_keep_an_instance_from_being_idle() -> None:
    async with run_router(FakeEngine("d", metrics=counts(1, 1))) as world:
        await wait_until(lambda: instance_state(world).engine_requests == 2, "the engine's count")
        assert (instance_state(world).legs, instance_state(world).is_idle(since_s=0.0)) == (0, False)
        world["d"].metrics = counts(0, 0)
        await wait_until(lambda: instance_state(world).engine_requests == 0, "its end")
        read_s = instance_state(world).engine_read_at_s
        assert [instance_state(world).is_idle(since_s=since_s) for since_s in (read_s - 1, read_s + 60)] == [
            True,
            False,
        ]


async def test_an_engine_that_does_not_respond_or_was_removed_counts_as_idle() -> None:
    async with run_router(FakeEngine("d", metrics=counts(1, 0))) as world:
        await wait_until(lambda: instance_state(world).engine_requests == 1, "the engine's count")
        world["d"].metrics = b""
        await wait_until(lambda: instance_state(world).engine_requests is None, "silence")
        world["d"].metrics = counts(1, 0)
        await wait_until(lambda: instance_state(world).engine_requests == 1, "the engine's count again")
        world.router.fleet.instances[0].clear_endpoint()
        assert (instance_state(world).engine_requests, instance_state(world).is_idle(since_s=1e12)) == (
            None,
            True,
        )


@dataclass
class DecodingEngine(FakeEngine):
    """An engine whose decodes have made tokens since each earlier request for metrics."""

    answered_probes: int = 0

    async def _page(self, response: ResponseWriter) -> None:
        self.answered_probes += 1
        counts = self.metrics
        self.metrics += (
            b"vllm:inter_token_latency_seconds_sum %d\nvllm:inter_token_latency_seconds_count %d\n"
            % (self.answered_probes, 40 * self.answered_probes)
        )
        await super()._page(response)
        self.metrics = counts


async def test_a_full_batch_shows_how_many_requests_an_engine_decodes_together() -> None:
    async with run_router(DecodingEngine("d", metrics=counts(40, 3))) as world:
        assert instance_state(world).max_seqs is None
        await wait_until(lambda: instance_state(world).max_seqs == 40, "three probes of a full batch")
        assert world.router.fleet["d"].max_seqs == 40


async def test_requests_whose_kv_is_on_its_way_do_not_wait_for_a_place() -> None:
    causes = (
        b'vllm:num_requests_waiting_by_reason{reason="capacity"} 0\n'
        b'vllm:num_requests_kv_fetch_by_stage{stage="in_progress"} 3\n'
    )
    engine = DecodingEngine("d", metrics=counts(40, 3) + causes)
    async with run_router(engine) as world:
        await wait_until(lambda: engine.answered_probes >= 5, "five probes")
        instance = world.router.fleet["d"]
        assert (instance.engine_running, instance.engine_waiting, instance.max_seqs) == (40, 0, None)


def tokens(computed: int) -> bytes:
    return b"vllm:prompt_tokens_total %d\nvllm:generation_tokens_total 0\n" % computed


async def test_an_engine_that_counts_its_tokens_anew_has_died() -> None:
    async with run_router(FakeEngine("d", metrics=tokens(100))) as world:
        instance, deaths = world.router.fleet["d"], world.router.journeys.engine_deaths
        for computed, died in ((100, 0), (101, 0), (10, 1), (20, 1)):
            world["d"].metrics = tokens(computed)
            await wait_until(lambda: instance.tokens_computed == computed, "the engine's count")  # noqa: B023  # awaited here
            assert deaths.count(time.monotonic()) == died


@dataclass
class GatedEngine(FakeEngine):
    """An engine that responds to requests for metrics once `may_respond` is set."""

    metrics_requested: bool = False
    may_respond: asyncio.Event = field(default_factory=asyncio.Event)

    async def _page(self, response: ResponseWriter) -> None:
        self.metrics_requested = True
        await self.may_respond.wait()
        await super()._page(response)


async def test_a_late_response_of_a_removed_engine_is_ignored() -> None:
    """The router does not probe a removed engine again, so its last count would stay for ever."""
    engine = GatedEngine("d", metrics=counts(1, 0))
    async with run_router(engine) as world:
        await wait_until(lambda: engine.metrics_requested, "the metrics are requested")
        instance = world.router.fleet["d"]
        pool = instance.connection_pool
        instance.clear_endpoint()
        assert pool is not None
        assert pool.busy
        engine.may_respond.set()
        await wait_until(lambda: not pool.busy, "the response")
        await run_pending_tasks()
        assert (instance_state(world).engine_requests, instance_state(world).is_idle(since_s=0.0)) == (
            None,
            True,
        )
