"""The step loop on a virtual clock: late wake-ups, arrivals between steps, ends."""

import asyncio
from dataclasses import dataclass, field

import pytest

from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_simulator.engine import Engine, EngineRequest, Finished, FinishReason, OutputToken
from fulcrum_simulator.server.metrics import CacheConfig, EngineMetrics
from fulcrum_simulator.server.runner import LAG_MAX_S, EngineRunner
from tests.waiting import advance, wait_until

PROFILE = load_profile("laptop")
pytestmark = [pytest.mark.looptime(start=0.0)]


@dataclass
class RecordingSink:
    """A `TokenSink` that records its calls and the time of each token."""

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
    """The loop's time plus the time that a late machine has lost."""

    def __init__(self) -> None:
        self.lost_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.lost_s


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
    """Return the TTFT and ITL samples of the engine model, driven from event to event."""
    engine, arrivals, now_s = Engine(PROFILE, engine_id="v"), list(requests), 0.0
    while arrivals or engine.gauges.running or engine.gauges.waiting:
        while arrivals and arrivals[0].arrival_s <= now_s:
            engine.submit(arrivals.pop(0))
        step = engine.start_step(now_s)
        if step is None:
            now_s = arrivals[0].arrival_s
            continue
        now_s += step.duration_s
        engine.finish_step(now_s)
    return engine.stats.samples.ttft_s, engine.stats.samples.itl_s


async def wait_until_idle(runner: EngineRunner) -> None:
    """Wait until every request of the runner has ended."""
    await wait_until(lambda: not runner.live_requests, "all requests have ended")


async def submit_all(runner: EngineRunner, requests: list[EngineRequest]) -> list[RecordingSink]:
    """Submit each request at its arrival; returns when all have ended."""
    sinks = []
    for each in requests:
        await advance(each.arrival_s - asyncio.get_running_loop().time())
        sinks.append(RecordingSink())
        runner.submit(each, sinks[-1])
    await wait_until_idle(runner)
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
        clock.lost_s += 0.004

        def has_advanced(before: int = before) -> bool:
            return not runner.live_requests or len(sink.times_s) > before

        await wait_until(has_advanced)
    ttft_s, itl_s = run_pure_model([request("a", arrival_s=0.0, tokens=50)])
    samples = runner.engine.stats.take_samples()
    assert samples.ttft_s == pytest.approx(ttft_s)
    assert samples.itl_s == pytest.approx(itl_s)
    assert 0 < runner.lateness_max_s < 0.0085


async def test_lost_time_beyond_the_bound_is_skipped(clock: LateClock) -> None:
    runner, sink = new_runner(clock), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, tokens=10), sink)
    await wait_until(lambda: len(sink.times_s) >= 3)
    clock.lost_s += 5.0
    await wait_until_idle(runner)
    assert runner.lateness_max_s > 4.9
    itl_s = sorted(runner.engine.stats.take_samples().itl_s)
    assert itl_s[-1] == pytest.approx(5.0 - LAG_MAX_S, abs=0.05)
    assert itl_s[-2] < 0.05


async def test_a_request_that_arrives_during_a_step_joins_the_next_step(clock: LateClock) -> None:
    runner, first, second = new_runner(clock), RecordingSink(), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, prompt_tokens=400, tokens=1), first)
    await advance(0.05)
    runner.submit(request("b", arrival_s=0.05, prompt_tokens=100, tokens=1), second)
    await wait_until_idle(runner)
    model = PROFILE.step_model
    first_s = model.step_s([(0, 400)], [])
    assert first.times_s == pytest.approx([first_s], abs=1e-6)
    assert second.times_s == pytest.approx([first_s + model.step_s([(0, 100)], [])], abs=1e-6)


async def test_an_aborted_request_gets_no_more_callbacks_and_frees_its_blocks(clock: LateClock) -> None:
    runner, sink = new_runner(clock), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, tokens=1000), sink)
    await wait_until(lambda: sink.times_s)
    runner.abort("a")
    runner.abort("a")
    assert (runner.live_requests, sink.ends, runner.engine.gauges.kv_usage) == (0, [], 0.0)
    assert runner.engine.stats.finished[FinishReason.ABORT] == 1


async def test_abort_all_ends_running_and_not_yet_submitted_requests(clock: LateClock) -> None:
    runner, running, unseen = new_runner(clock), RecordingSink(), RecordingSink()
    runner.submit(request("a", arrival_s=0.0, tokens=1000), running)
    await wait_until(lambda: running.times_s)
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
    await wait_until(lambda: len(sink.times_s) >= 2)
    runner.pause()
    await advance(3.0)
    assert len(sink.times_s) == 2
    runner.resume()
    await wait_until_idle(runner)
    assert len(sink.times_s) == 5
    assert runner.lateness_max_s < 0.01


async def test_a_slow_engine_takes_a_multiple_of_each_step(clock: LateClock) -> None:
    runner, sink = new_runner(clock), RecordingSink()
    runner.slow_factor = 3.0
    runner.submit(request("a", arrival_s=0.0, prompt_tokens=100, tokens=1), sink)
    await wait_until_idle(runner)
    assert sink.times_s == pytest.approx([3 * PROFILE.step_model.step_s([(0, 100)], [])], abs=1e-6)
