"""The step loop on a clock that the test owns: late wake-ups, arrivals between steps, ends."""

import asyncio
from dataclasses import dataclass, field

import pytest

from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_simulator.engine import Engine, EngineRequest, Finished, FinishReason, OutputToken
from fulcrum_simulator.server.metrics import CacheConfig, EngineMetrics
from fulcrum_simulator.server.runner import LAG_MAX_S, EngineRunner

PROFILE = load_profile("laptop")
pytestmark = [pytest.mark.looptime(start=0.0)]


@dataclass
class RecordingSink:
    """A sink that notes what it is told, and when."""

    times_s: list[float] = field(default_factory=list)
    ends: list[Finished | None] = field(default_factory=list)
    deaths: int = 0

    def on_token(self, _: OutputToken) -> None:
        self.times_s.append(asyncio.get_running_loop().time())

    def on_finished(self, end: Finished | None) -> None:
        self.ends.append(end)

    def on_engine_death(self) -> None:
        self.deaths += 1


class LateClock:
    """The loop's time, plus what the machine has slept through."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.slept_s


def new_runner(clock: LateClock, profile: EngineProfile = PROFILE) -> EngineRunner:
    cache_config = CacheConfig(
        block_tokens=profile.block_size, num_blocks=profile.kv_blocks, kv_bytes=1, max_model_tokens=4096
    )
    metrics = EngineMetrics(model="m", cache=cache_config, created_s=0.0)
    return EngineRunner(Engine(profile, engine_id="a"), metrics, now_s=clock)


def request(name: str, *, arrival_s: float, prompt_tokens: int = 100, tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        id=name,
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        max_tokens=tokens,
        digest=name.encode().ljust(16),
    )


@pytest.fixture
def clock() -> LateClock:
    """A machine that is on time until the test makes it late."""
    return LateClock()


def run_pure_model(requests: list[EngineRequest]) -> tuple[list[float], list[float]]:
    """TTFT and ITL samples of the pure model, driven from event to event."""
    engine, coming, now_s = Engine(PROFILE, engine_id="v"), list(requests), 0.0
    while coming or engine.gauges.running or engine.gauges.waiting:
        while coming and coming[0].arrival_s <= now_s:
            engine.submit(coming.pop(0))
        step = engine.start_step(now_s)
        if step is None:
            now_s = coming[0].arrival_s
            continue
        now_s += step.duration_s
        engine.finish_step(now_s)
    return engine.stats.samples.ttft_s, engine.stats.samples.itl_s


async def submit_all(runner: EngineRunner, requests: list[EngineRequest]) -> list[RecordingSink]:
    """Submits each request when it arrives; returns when all have ended."""
    sinks = []
    for each in requests:
        await asyncio.sleep(each.arrival_s - asyncio.get_running_loop().time())
        sinks.append(RecordingSink())
        runner.submit(each, sinks[-1])
    while runner.live_requests:
        await asyncio.sleep(0.01)
    return sinks


async def test_in_real_time_every_latency_is_that_of_the_pure_model(clock: LateClock) -> None:
    requests = [request(str(i), arrival_s=0.031 * i, prompt_tokens=50 + 90 * i, tokens=12) for i in range(8)]
    runner = new_runner(clock)
    sinks = await submit_all(runner, requests)
    ttft_s, itl_s = run_pure_model(requests)
    samples = runner.engine.stats.take_samples()
    assert samples.ttft_s == pytest.approx(ttft_s, abs=1e-9)
    assert samples.itl_s == pytest.approx(itl_s, abs=1e-9)
    assert [len(each.times_s) for each in sinks] == [12] * 8
    assert runner.lateness_max_s == pytest.approx(0.0, abs=1e-5)


async def test_late_wake_ups_are_measured_and_do_not_add_up(clock: LateClock) -> None:
    runner, sink = new_runner(clock), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, tokens=50), sink)
    while runner.live_requests:
        before = len(sink.times_s)
        clock.slept_s += 0.004
        while runner.live_requests and len(sink.times_s) == before:
            await asyncio.sleep(0.001)
    ttft_s, itl_s = run_pure_model([request("a", arrival_s=0.0, tokens=50)])
    samples = runner.engine.stats.take_samples()
    assert samples.ttft_s == pytest.approx(ttft_s)
    assert samples.itl_s == pytest.approx(itl_s)
    assert 0 < runner.lateness_max_s < 0.0085


async def test_lost_time_beyond_the_bound_is_given_up(clock: LateClock) -> None:
    runner, sink = new_runner(clock), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, tokens=10), sink)
    while len(sink.times_s) < 3:
        await asyncio.sleep(0.001)
    clock.slept_s += 5.0
    while runner.live_requests:
        await asyncio.sleep(0.001)
    assert runner.lateness_max_s > 4.9
    itl_s = sorted(runner.engine.stats.take_samples().itl_s)
    assert itl_s[-1] == pytest.approx(5.0 - LAG_MAX_S, abs=0.05)
    assert itl_s[-2] < 0.05


async def test_a_request_that_arrives_during_a_step_joins_the_one_after(clock: LateClock) -> None:
    runner, first, second = new_runner(clock), RecordingSink(), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, prompt_tokens=400, tokens=1), first)
    await asyncio.sleep(0.05)
    runner.submit(request("b", arrival_s=0.05, prompt_tokens=100, tokens=1), second)
    while runner.live_requests:
        await asyncio.sleep(0.001)
    model = PROFILE.step_model
    first_s = model.step_s([(0, 400)], [])
    assert first.times_s == pytest.approx([first_s], abs=1e-6)
    assert second.times_s == pytest.approx([first_s + model.step_s([(0, 100)], [])], abs=1e-6)


async def test_an_aborted_request_gets_no_more_callbacks_and_frees_its_blocks(clock: LateClock) -> None:
    runner, sink = new_runner(clock), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, tokens=1000), sink)
    while not sink.times_s:
        await asyncio.sleep(0.001)
    runner.abort("a")
    runner.abort("a")
    assert (runner.live_requests, sink.ends, runner.engine.gauges.kv_usage) == (0, [], 0.0)
    assert runner.engine.stats.finished[FinishReason.ABORT] == 1


async def test_abort_all_ends_running_and_not_yet_submitted_requests(clock: LateClock) -> None:
    runner, running, unseen = new_runner(clock), RecordingSink(), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, tokens=1000), running)
    while not running.times_s:
        await asyncio.sleep(0.001)
    runner.submit(request("b", arrival_s=clock()), unseen)
    runner.abort_all()
    assert [end and end.reason for end in running.ends] == [FinishReason.ABORT]
    assert unseen.ends == [None]
    assert runner.live_requests == 0


async def test_a_paused_engine_generates_nothing_and_the_pause_does_not_count(
    clock: LateClock,
) -> None:
    runner, sink = new_runner(clock), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, tokens=5), sink)
    while len(sink.times_s) < 2:
        await asyncio.sleep(0.001)
    runner.pause()
    await asyncio.sleep(3.0)
    assert len(sink.times_s) == 2
    runner.resume()
    while runner.live_requests:
        await asyncio.sleep(0.001)
    assert len(sink.times_s) == 5
    assert runner.lateness_max_s < 0.01


async def test_a_slow_engine_takes_a_multiple_of_each_step(clock: LateClock) -> None:
    runner, sink = new_runner(clock), RecordingSink()
    runner.slow_factor = 3.0
    runner.submit(request("a", arrival_s=0.0, prompt_tokens=100, tokens=1), sink)
    while runner.live_requests:
        await asyncio.sleep(0.001)
    assert sink.times_s == pytest.approx([3 * PROFILE.step_model.step_s([(0, 100)], [])], abs=1e-6)
