"""What the router tells of the requests that an engine says it has: of other routers, too."""

from fulcrum_core.state import InstanceState
from fulcrum_router.state_port import picture
from tests.integration.router_engines import FakeEngine, World, running, until


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
