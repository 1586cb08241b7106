"""What the router tells of the requests that an engine says it has: of other routers, too."""

import asyncio
from dataclasses import dataclass, field

from fulcrum_core.state import InstanceState
from fulcrum_router.control.state_port import picture
from tests.integration.router.fake_engines import Answering, FakeEngine, World, running, until


def counts(running: int, waiting: int) -> bytes:
    return b"vllm:num_requests_running %d\nvllm:num_requests_waiting %d\n" % (running, waiting)


def told(world: World) -> InstanceState:
    (state,) = picture(world.router, now_s=0.0).instances
    return state


async def test_requests_that_another_router_sent_keep_an_instance_from_rest() -> None:
    async with running(FakeEngine("d", metrics=counts(1, 1))) as world:
        await until(lambda: told(world).engine_requests == 2, "the engine's count")
        assert (told(world).legs, told(world).at_rest(since_s=0.0)) == (0, False)
        world["d"].metrics = counts(0, 0)
        await until(lambda: told(world).engine_requests == 0, "its end")
        read_s = told(world).engine_read_s
        assert [told(world).at_rest(since_s=since_s) for since_s in (read_s - 1, read_s + 60)] == [
            True,
            False,
        ]


async def test_an_engine_that_does_not_answer_or_is_gone_keeps_nobody_waiting() -> None:
    async with running(FakeEngine("d", metrics=counts(1, 0))) as world:
        await until(lambda: told(world).engine_requests == 1, "the engine's count")
        world["d"].metrics = b""
        await until(lambda: told(world).engine_requests is None, "silence")
        world["d"].metrics = counts(1, 0)
        await until(lambda: told(world).engine_requests == 1, "the engine's count again")
        world.router.fleet.all[0].leave()
        assert (told(world).engine_requests, told(world).at_rest(since_s=1e12)) == (None, True)


@dataclass
class Slow(FakeEngine):
    """Tells of itself when it may; `waits` says that it is asked."""

    waits: bool = False
    may: asyncio.Event = field(default_factory=asyncio.Event)

    async def _page(self, answering: Answering) -> None:
        self.waits = True
        await self.may.wait()
        await super()._page(answering)


async def test_what_an_engine_says_after_it_has_left_says_nothing_of_the_next_one() -> None:
    """Nobody would ask again, and the instance would never be at rest."""
    engine = Slow("d", metrics=counts(1, 0))
    async with running(engine) as world:
        await until(lambda: engine.waits, "it is asked")
        instance = world.router.fleet["d"]
        pool = instance.pool
        instance.leave()
        assert pool is not None
        assert pool.busy
        engine.may.set()
        await until(lambda: not pool.busy, "its answer")
        for _ in range(5):
            await asyncio.sleep(0)
        assert (told(world).engine_requests, told(world).at_rest(since_s=0.0)) == (None, True)
