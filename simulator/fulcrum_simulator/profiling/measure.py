"""Measure prefills, decode steps and mixed steps of one engine, and KV transfers to another one, over HTTP.

Of the other engine it also measures by how much a transfer delays the decodes there.

Both engines must be idle. All points of all curves are measured one after the other, then all again, and
the median of each counts: a slow moment of the engine spoils one value of some points, and if the engine
becomes slower for good, all curves change alike. `fulcrum profile` calls it.

A prefill or a KV transfer lasts from sending the request to its first token. Decode steps and mixed steps
are differences between arrivals of tokens, so that the time from the engine to the client cancels out.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from fulcrum_simulator.profiling.engine_client import EngineClient, EngineLimits, EngineUnusable, TokenTimes
from fulcrum_simulator.profiling.points import DECODE_STEPS, MeasurementPlan
from fulcrum_simulator.profiling.samples import (
    DecodeMeasurement,
    FetchMeasurement,
    MeasuredCurves,
    MixedMeasurement,
    PrefillMeasurement,
    TransferMeasurement,
)

P = TypeVar("P")
T = TypeVar("T")
M = TypeVar(
    "M", PrefillMeasurement, DecodeMeasurement, MixedMeasurement, TransferMeasurement, FetchMeasurement
)
Report = Callable[[str], None]
_STEPS_MIN = 8
"""Fewest steps from which a duration is computed."""
TRANSFER_ROUNDS = 3
"""Transfers of each length in a round: they are short, and what an engine does between steps varies more."""
DECODE_STEPS_MAX = 64 * DECODE_STEPS
JOINING_PROMPTS = 4
"""Prompts that join a batch one after the other: the delay by a single one is not much longer than noise."""
JOINING_STEPS = 4
"""Steps of the batch for each of them, besides those in which it is computed."""
JOINING_FETCHES = 8
"""KV fetches beside a batch, one after the other: on CPUs single delays differ several times over."""
FETCH_STEPS_MAX = 64
"""Most steps of the batch for each of them, while the other engine computes the prompt and it is fetched."""
_PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False}


class Measurer:
    """Measures one engine of known limits, and KV transfers to a second one, taken to have the same limits.

    `report` is called with a line before each point.
    """

    def __init__(
        self, client: EngineClient, limits: EngineLimits, *, token_budget: int, repeats: int, report: Report
    ) -> None:
        self._client, self._limits = client, limits
        self._token_budget, self._repeats, self._report = token_budget, repeats, report
        self._decode_steps, self._mixed_steps, self._fetch_steps = _Steps(), _Steps(), _Steps()

    async def warm_up(self, plan: MeasurementPlan) -> None:
        """Run the longest prompt and the largest batch once: engines compile and allocate on first use."""
        self._report("warm-up")
        await self._measure_prefill(plan.prefill[-1])
        await self._measure_decode((plan.decode[-1][0], plan.decode[0][1]))

    async def measure(self, plan: MeasurementPlan, decode: EngineClient | None = None) -> MeasuredCurves:
        """Measure all points of the plan, and KV transfers to the engine `decode` if there is one.

        The first transfer comes before all other points. A point is left out if the batch ends too soon
        after the requests that should join it.
        """
        first, transfers, fetches = None, None, None
        if decode is not None:
            first = await self._measure_transfer(decode, plan.transfer[0], is_first=True)
            transfers = _CurveInRounds(plan.transfer, partial(self._measure_transfer, decode))
            fetches = _CurveInRounds(plan.transfer, partial(self._measure_fetch, decode, plan))
        prefill = _CurveInRounds(plan.prefill, self._measure_prefill)
        decodes = _CurveInRounds(plan.decode, self._measure_decode)
        mixed = _CurveInRounds(plan.mixed, partial(self._measure_mixed, plan))
        for _ in range(self._repeats):
            await prefill.measure_all()
            await decodes.measure_all()
            await mixed.measure_all()
            if transfers is not None:
                for _ in range(TRANSFER_ROUNDS):
                    await transfers.measure_all()
            if fetches is not None:
                await fetches.measure_all()
        return MeasuredCurves(
            prefill.take_medians(),
            decodes.take_medians(),
            mixed.take_medians(),
            first,
            transfers.take_medians() if transfers else [],
            fetches.take_medians() if fetches else [],
        )

    async def _measure_prefill(self, tokens: int) -> PrefillMeasurement:
        self._report(f"prefill of {tokens} tokens")
        times = TokenTimes()
        await self._client.stream(self._body(tokens, max_tokens=1), times)
        return PrefillMeasurement(tokens, times.tokens_s[0] - times.sent_s)

    async def _measure_decode(self, point: tuple[int, int]) -> DecodeMeasurement:
        """Return the mean step while exactly `batch` requests with prompts of `context` decode."""
        batch, context = point
        self._report(f"decode of {batch} requests of {context} tokens")

        async def measure(steps: int) -> DecodeMeasurement:
            max_tokens = self._steps_to_fill(batch, context) + steps
            runs = [TokenTimes() for _ in range(batch)]
            body = partial(self._body, context, max_tokens=max_tokens)
            await _run_all([self._client.stream(body(), run) for run in runs])
            start_s, end_s = max(run.tokens_s[0] for run in runs), min(run.tokens_s[-1] for run in runs)
            before = [bisect_left(run.tokens_s, start_s) for run in runs]
            together, seconds = _mean_step(runs[0].tokens_s, start_s, end_s)
            # The step that makes token j of a request reads its prompt and j tokens.
            context_tokens = sum(context + index + (together + 1) / 2 for index in before)
            return DecodeMeasurement(batch, context_tokens, seconds)

        return await self._with_enough_steps(measure, self._decode_steps, self._client, batch, context)

    async def _measure_mixed(self, plan: MeasurementPlan, tokens: int) -> MixedMeasurement:
        """Return the mean step that computes a prompt of `tokens` while a batch decodes."""
        batch, context = plan.mixed_batch, plan.decode[0][1]
        self._report(f"prefill of {tokens} tokens in steps with {batch} decodes")
        prompt_steps = JOINING_STEPS + -(-tokens // self._room(batch))

        async def measure(steps: int) -> MixedMeasurement:
            joining = [TokenTimes() for _ in range(JOINING_PROMPTS)]

            async def join() -> None:
                for times in joining:
                    await self._client.stream(self._body(tokens, max_tokens=1), times)

            runs = await self._decode_beside(
                self._client, plan, join, steps=steps, most=JOINING_PROMPTS * prompt_steps
            )
            alone_s, delay_s = _compute_delay(runs, joining)
            context_tokens = _count_context(runs, joining, context=context)
            return MixedMeasurement(tokens, alone_s + max(0.0, delay_s), batch, context_tokens)

        try:
            return await self._with_enough_steps(measure, self._mixed_steps, self._client, batch, context)
        except _JoinedTooLate:
            self._report(f"left out: the batch ended too soon after prompts of {tokens} tokens")
            raise

    async def _measure_fetch(
        self, decode: EngineClient, plan: MeasurementPlan, tokens: int
    ) -> FetchMeasurement:
        """Return the mean time by which fetching KV of `tokens` delays what `decode` decodes."""
        batch, context = plan.mixed_batch, plan.decode[0][1]
        self._report(f"KV transfer of {tokens} tokens in steps with {batch} decodes")

        async def measure(steps: int) -> FetchMeasurement:
            joining = [TokenTimes() for _ in range(JOINING_FETCHES)]

            async def join() -> None:
                for times in joining:
                    await self._fetch(decode, await self._compute_kv(tokens), times)

            runs = await self._decode_beside(
                decode, plan, join, steps=steps, most=JOINING_FETCHES * FETCH_STEPS_MAX
            )
            return FetchMeasurement(tokens, _compute_delay(runs, joining)[1])

        try:
            return await self._with_enough_steps(measure, self._fetch_steps, decode, batch, context)
        except _JoinedTooLate:
            self._report(f"left out: the batch ended too soon after KV transfers of {tokens} tokens")
            raise

    async def _decode_beside(
        self,
        engine: EngineClient,
        plan: MeasurementPlan,
        join: Callable[[], Awaitable[None]],
        *,
        steps: int,
        most: int,
    ) -> list[TokenTimes]:
        """Run a batch on `engine`, call `join` after some steps, and end the batch as many steps later.

        The batch has at most `most` steps meanwhile. Returns its token times; the engine is idle then.
        """
        batch, context = plan.mixed_batch, plan.decode[0][1]
        max_tokens = self._steps_to_fill(batch, context) + 2 * steps + most
        max_tokens = min(max_tokens, self._find_room(batch, context))
        runs = [TokenTimes() for _ in range(batch)]
        watch = _Watch(runs, max_tokens)

        async def join_settled() -> None:
            await watch.wait_for_steps(steps)
            await join()
            await watch.wait_for_steps(steps)

        body = partial(self._body, context, max_tokens=max_tokens)
        await _run_until_last([*(engine.stream(body(), run) for run in runs), join_settled()])
        await engine.stream(self._body(1, max_tokens=1), TokenTimes())  # it has dropped the batch before
        return runs

    async def _with_enough_steps(
        self,
        measure: Callable[[int], Awaitable[T]],
        steps: "_Steps",
        engine: EngineClient,
        batch: int,
        context: int,
    ) -> T:
        """Measure with twice as many steps until enough are undisturbed; the curve goes on with them.

        On a busy machine the last request of a batch may come when the first one has almost ended, and an
        engine that shares its thread with its server sends many tokens at once.
        """
        most = max(DECODE_STEPS, min(self._find_room(batch, context) // 4, DECODE_STEPS_MAX))
        while True:
            try:
                return await measure(min(steps.count, most))
            except _TooFewSteps as error:
                if steps.count >= most:
                    if isinstance(error, _JoinedTooLate):
                        raise
                    raise EngineUnusable(
                        engine.url,
                        f"decoded only {error.steps} steps undisturbed: is it idle, is --token-budget right?",
                    ) from None
                steps.count *= 2

    async def _measure_transfer(
        self, decode: EngineClient, tokens: int, *, is_first: bool = False
    ) -> TransferMeasurement:
        name = f"KV transfer of {tokens} tokens"
        self._report(f"first {name} to {decode.url}" if is_first else name)
        times = TokenTimes()
        await self._fetch(decode, await self._compute_kv(tokens), times)
        return TransferMeasurement(tokens, times.tokens_s[0] - times.sent_s)

    async def _compute_kv(self, tokens: int) -> dict[str, Any]:
        """Compute a prompt; returns the request with which another engine fetches its KV."""
        body = self._body(tokens, max_tokens=1)
        response = await self._client.complete({**body, "kv_transfer_params": _PREFILL_LEG})
        params = response.get("kv_transfer_params")
        if not isinstance(params, dict) or not params:
            raise EngineUnusable(self._client.url, "returned no kv_transfer_params: has it a KV connector?")
        # With this field the other engine would report the cached tokens of this one in place of its own.
        params = {key: value for key, value in params.items() if key != "remote_prefill_cached_tokens"}
        return {**body, "kv_transfer_params": params}

    async def _fetch(self, decode: EngineClient, body: dict[str, Any], times: TokenTimes) -> None:
        await decode.stream(body, times)
        fetched_min = len(body["prompt"]) - self._limits.block_size
        if times.cached_tokens is not None and times.cached_tokens < fetched_min:
            raise EngineUnusable(decode.url, "computed the prompt itself instead of fetching its KV")

    def _body(self, tokens: int, *, max_tokens: int) -> dict[str, Any]:
        prompt = self._client.make_prompt(tokens)
        return {"model": self._limits.model, "prompt": prompt, "max_tokens": max_tokens}

    def _room(self, batch: int) -> int:
        """Return the prompt tokens of a step in which `batch` requests decode."""
        return self._token_budget - batch

    def _find_room(self, batch: int, context: int) -> int:
        """Return how many tokens each request of a batch can generate."""
        return min(self._limits.max_model_tokens, self._limits.kv_tokens // batch) - context

    def _steps_to_fill(self, batch: int, context: int) -> int:
        """Return the steps until all prompts of a batch are computed; earlier ones decode meanwhile."""
        return -(-batch * context // self._room(batch)) + 4


@dataclass
class _Steps:
    """Steps that the points of one curve measure."""

    count: int = DECODE_STEPS


class _CurveInRounds(Generic[P, M]):
    """The values of all points of one curve, one from each round."""

    def __init__(self, points: Sequence[P], measure: Callable[[P], Awaitable[M]]) -> None:
        self._measure: Callable[[P], Awaitable[M]] = measure
        self._values: dict[P, list[M]] = {point: [] for point in points}

    async def measure_all(self) -> None:
        """Measure each point once; one that raises `_JoinedTooLate` is left out, with its earlier values."""
        for point in tuple(self._values):
            try:
                self._values[point].append(await self._measure(point))
            except _JoinedTooLate:
                del self._values[point]

    def take_medians(self) -> list[M]:
        """Return of each point the value whose duration is the median, of two in the middle the lower one."""
        return [
            sorted(values, key=lambda one: one.seconds)[(len(values) - 1) // 2]
            for values in self._values.values()
        ]


class _TooFewSteps(Exception):
    """A point has too few steps from which its duration can be computed."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


class _JoinedTooLate(_TooFewSteps):
    """Fewer than `_STEPS_MIN` steps of the batch follow the last request that joins it, or none do."""


def _mean_step(tokens_s: Sequence[float], start_s: float, end_s: float) -> tuple[int, float]:
    """Return the number of steps between two times, and their mean duration.

    Tokens that a late client reads together look like one; they end together with the last of them.
    """
    first, last = _find_end(tokens_s, start_s), bisect_right(tokens_s, end_s) - 1
    apart = len(set(tokens_s[first : last + 1])) - 1
    if apart < _STEPS_MIN:
        raise _TooFewSteps(max(0, apart))
    return last - first, (tokens_s[last] - tokens_s[first]) / (last - first)


def _find_end(tokens_s: Sequence[float], time_s: float) -> int:
    """Return the index of the last token that arrived with the first one at this time or later."""
    first = bisect_left(tokens_s, time_s)
    return bisect_right(tokens_s, tokens_s[first]) - 1 if first < len(tokens_s) else first


def _compute_delay(runs: Sequence[TokenTimes], joining: Sequence[TokenTimes]) -> tuple[float, float]:
    """Return the mean step of a batch without a joining request, and the mean delay by one, in seconds.

    As many steps without one count before as after the others, so that the growth of the contexts and a
    steady drift of the engine's speed cancel out.
    """
    tokens_s = runs[0].tokens_s
    spans = _find_spans(tokens_s, joining)
    first, last = spans[0][0], spans[-1][1]
    start = _find_end(tokens_s, max(run.tokens_s[0] for run in runs))
    end = bisect_right(tokens_s, min(run.tokens_s[-1] for run in runs)) - 1
    if end - last < _STEPS_MIN:
        raise _JoinedTooLate(max(0, end - last))
    beside = min(first - start, end - last)
    _, before_s = _mean_step(tokens_s, tokens_s[first - beside], tokens_s[first])
    _, after_s = _mean_step(tokens_s, tokens_s[last], tokens_s[last + beside])
    alone_s = (before_s + after_s) / 2
    late_s = sum(tokens_s[stop] - tokens_s[begin] - (stop - begin) * alone_s for begin, stop in spans)
    return alone_s, late_s / len(joining)


def _count_context(runs: Sequence[TokenTimes], joining: Sequence[TokenTimes], *, context: int) -> float:
    """Return the tokens of KV of a batch, whose prompts have `context`, in the middle of the joining ones."""
    spans = _find_spans(runs[0].tokens_s, joining)
    half = (spans[-1][1] - spans[0][0] - 1) / 2
    return sum(context + bisect_right(run.tokens_s, joining[0].sent_s) + half for run in runs)


def _find_spans(tokens_s: Sequence[float], joining: Sequence[TokenTimes]) -> list[tuple[int, int]]:
    """Return for each joining request the last token before it was sent, and the first after its own."""
    spans: list[tuple[int, int]] = []
    for times in joining:
        begin, end = bisect_right(tokens_s, times.sent_s) - 1, _find_end(tokens_s, times.tokens_s[0])
        counted = spans[-1][1] if spans else begin
        spans.append((max(begin, counted), max(end, counted)))
    return spans


class _Watch:
    """Waits for steps of a batch; `max_tokens` are the tokens that each of its requests has at last."""

    def __init__(self, runs: Sequence[TokenTimes], max_tokens: int) -> None:
        self._runs, self._max_tokens = runs, max_tokens
        self._has_token = asyncio.Event()
        for run in runs:
            run.on_token = self._has_token.set

    async def wait_for_steps(self, steps: int) -> None:
        """Wait for so many steps after all have their first token, or until one request has its last."""
        while not all(run.tokens_s for run in self._runs) and not self._has_ended():
            await self._wait_for_token()
        until = len(self._runs[0].tokens_s) + steps
        while len(self._runs[0].tokens_s) < until and not self._has_ended():
            await self._wait_for_token()

    def _has_ended(self) -> bool:
        return max(len(run.tokens_s) for run in self._runs) >= self._max_tokens

    async def _wait_for_token(self) -> None:
        self._has_token.clear()
        await self._has_token.wait()


async def _run_all(measurements: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them at the same time; the first failure ends all."""
    tasks = [asyncio.ensure_future(each) for each in measurements]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel_all(tasks)


async def _run_until_last(measurements: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them at the same time until the last one ends, or until the first failure."""
    tasks = [asyncio.ensure_future(each) for each in measurements]
    running = set(tasks)
    try:
        while not tasks[-1].done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        await _cancel_all(tasks)


async def _cancel_all(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
