"""Measure prefills, decode steps and mixed steps of one engine, and KV transfers to another one, over HTTP.

Both engines must be idle. All points of a curve are measured one after the other, then all again, and the
median of each counts: a slow moment of the engine spoils one value of some points. A prefill or a KV
transfer lasts from sending the request to its first token. Decode steps and mixed steps are differences
between arrivals of tokens, so that the time from the engine to the client cancels out. `fulcrum profile`
calls it for each curve.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeVar

from fulcrum_simulator.profiling.engine_client import EngineClient, EngineLimits, EngineUnusable, TokenTimes
from fulcrum_simulator.profiling.points import DECODE_STEPS, MeasurementPlan
from fulcrum_simulator.profiling.samples import (
    DecodeMeasurement,
    MixedMeasurement,
    PrefillMeasurement,
    TransferMeasurement,
)

P = TypeVar("P")
T = TypeVar("T")
M = TypeVar("M", DecodeMeasurement, MixedMeasurement)
Report = Callable[[str], None]
_STEPS_MIN = 8
"""Fewest steps from which a duration is computed."""
TRANSFER_ROUNDS = 3
"""Transfers for each other repeat: they are short, and what an engine does between its steps varies more."""
DECODE_STEPS_MAX = 64 * DECODE_STEPS
JOINING_PROMPTS = 4
"""Prompts that join a batch one after the other: the delay by a single one is not much longer than noise."""
JOINING_STEPS = 4
"""Steps of the batch for each of them, besides those in which it is computed."""
_PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False}


class Measurer:
    """Measures one engine of known limits. `report` is called with a line before each point."""

    def __init__(
        self, client: EngineClient, limits: EngineLimits, *, token_budget: int, repeats: int, report: Report
    ) -> None:
        self._client, self._limits = client, limits
        self._token_budget, self._repeats, self._report = token_budget, repeats, report
        self._decode_steps = DECODE_STEPS

    async def warm_up(self, plan: MeasurementPlan) -> None:
        """Run the longest prompt and the largest batch once: engines compile and allocate on first use."""
        self._report("warm-up")
        await self._measure_prefill(plan.prefill[-1])
        await self._measure_decode(plan.decode[-1][0], plan.decode[0][1])

    async def measure_prefill(self, plan: MeasurementPlan) -> list[PrefillMeasurement]:
        """Measure the prefill curve."""

        async def measure(tokens: int) -> float:
            self._report(f"prefill of {tokens} tokens")
            return await self._measure_prefill(tokens)

        found = await self._measure_in_rounds(plan.prefill, measure, self._repeats)
        return [PrefillMeasurement(tokens, median(seconds)) for tokens, seconds in found.items()]

    async def measure_decode(self, plan: MeasurementPlan) -> list[DecodeMeasurement]:
        """Measure the decode grid."""

        async def measure(point: tuple[int, int]) -> DecodeMeasurement:
            batch, context = point
            self._report(f"decode of {batch} requests of {context} tokens")
            return await self._measure_decode(batch, context)

        found = await self._measure_in_rounds(plan.decode, measure, self._repeats)
        return [_take_median(samples) for samples in found.values()]

    async def measure_mixed(self, plan: MeasurementPlan) -> list[MixedMeasurement]:
        """Measure prompts that join a batch of decodes.

        A point is left out if the engine takes up the prompt only when the decodes have ended.
        """

        async def measure(tokens: int) -> MixedMeasurement:
            self._report(f"prefill of {tokens} tokens in steps with {plan.mixed_batch} decodes")
            try:
                return await self._measure_mixed(plan.mixed_batch, tokens, context=plan.decode[0][1])
            except _NotMixed:
                self._report(f"nothing: the engine did not compute {tokens} tokens in steps with decodes")
                raise

        found = await self._measure_in_rounds(plan.mixed, measure, self._repeats)
        return [_take_median(samples) for samples in found.values()]

    async def measure_transfers(
        self, plan: MeasurementPlan, decode: EngineClient
    ) -> tuple[TransferMeasurement, list[TransferMeasurement]]:
        """Measure the first KV transfer to the engine `decode`, and later ones of every length."""
        self._report(f"first KV transfer to {decode.url}")
        first = await self._measure_transfer(plan.transfer[0], decode)

        async def measure(tokens: int) -> float:
            self._report(f"KV transfer of {tokens} tokens")
            return (await self._measure_transfer(tokens, decode)).seconds

        found = await self._measure_in_rounds(plan.transfer, measure, TRANSFER_ROUNDS * self._repeats)
        return first, [TransferMeasurement(tokens, median(seconds)) for tokens, seconds in found.items()]

    async def _measure_in_rounds(
        self, points: Sequence[P], measure: Callable[[P], Awaitable[T]], rounds: int
    ) -> dict[P, list[T]]:
        """Return the values of each point, one of each round; a point that raises `_NotMixed` is left out."""
        found: dict[P, list[T]] = {point: [] for point in points}
        for _ in range(rounds):
            for point in tuple(found):
                try:
                    found[point].append(await measure(point))
                except _NotMixed:
                    del found[point]
        return found

    async def _measure_prefill(self, tokens: int) -> float:
        times = TokenTimes()
        await self._client.stream(self._body(tokens, max_tokens=1), times)
        return times.tokens_s[0] - times.sent_s

    async def _measure_decode(self, batch: int, context: int) -> DecodeMeasurement:
        """Return the mean step while exactly these requests decode."""

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

        return await self._with_enough_steps(measure, batch, context)

    async def _measure_mixed(self, batch: int, tokens: int, *, context: int) -> MixedMeasurement:
        """Return the mean step that computes a prompt of `tokens` while `batch` requests decode."""

        async def measure(steps: int) -> MixedMeasurement:
            joining_steps = JOINING_PROMPTS * (JOINING_STEPS + -(-tokens // self._room(batch)))
            max_tokens = self._steps_to_fill(batch, context) + 2 * steps + joining_steps
            runs, joining = (
                [TokenTimes() for _ in range(batch)],
                [TokenTimes() for _ in range(JOINING_PROMPTS)],
            )
            settled = _watch_steps(runs, steps)

            async def join() -> None:
                await settled.wait()
                for times in joining:
                    await self._client.stream(self._body(tokens, max_tokens=1), times)

            body = partial(self._body, context, max_tokens=max_tokens)
            await _run_all([*(self._client.stream(body(), run) for run in runs), join()])
            return _compute_mixed_step(runs, joining, tokens=tokens, context=context)

        return await self._with_enough_steps(measure, batch, context)

    async def _with_enough_steps(self, measure: Callable[[int], Awaitable[T]], batch: int, context: int) -> T:
        """Measure with twice as many steps until enough of them are undisturbed; later points begin there.

        On a busy machine the last request of a batch may come when the first one has almost ended, and an
        engine that shares its thread with its server sends many tokens at once.
        """
        room = min(self._limits.max_model_tokens, self._limits.kv_tokens // batch) - context
        most = max(DECODE_STEPS, min(room // 4, DECODE_STEPS_MAX))
        while True:
            try:
                return await measure(min(self._decode_steps, most))
            except _TooFewSteps as error:
                if self._decode_steps >= most:
                    if isinstance(error, _NotMixed):
                        raise
                    raise EngineUnusable(
                        self._client.url,
                        f"decoded only {error.steps} steps undisturbed: is it idle, is --token-budget right?",
                    ) from None
                self._decode_steps *= 2

    async def _measure_transfer(self, tokens: int, decode: EngineClient) -> TransferMeasurement:
        body = self._body(tokens, max_tokens=1)
        response = await self._client.complete({**body, "kv_transfer_params": _PREFILL_LEG})
        params = response.get("kv_transfer_params")
        if not isinstance(params, dict) or not params:
            raise EngineUnusable(self._client.url, "returned no kv_transfer_params: has it a KV connector?")
        # With this count vLLM would report how much the prefill engine, not this one, did not compute.
        params = {key: value for key, value in params.items() if key != "remote_prefill_cached_tokens"}
        times = TokenTimes()
        await decode.stream({**body, "kv_transfer_params": params}, times)
        if times.cached_tokens is not None and times.cached_tokens < tokens - self._limits.block_size:
            raise EngineUnusable(decode.url, "computed the prompt itself instead of fetching its KV")
        return TransferMeasurement(tokens, times.tokens_s[0] - times.sent_s)

    def _body(self, tokens: int, *, max_tokens: int) -> dict[str, Any]:
        prompt = self._client.make_prompt(tokens)
        return {"model": self._limits.model, "prompt": prompt, "max_tokens": max_tokens}

    def _room(self, batch: int) -> int:
        """Return the prompt tokens of a step in which `batch` requests decode."""
        return self._token_budget - batch

    def _steps_to_fill(self, batch: int, context: int) -> int:
        """Return the steps until all prompts of a batch are computed; earlier ones decode meanwhile."""
        return -(-batch * context // self._room(batch)) + 4


class _TooFewSteps(Exception):
    """A point has too few steps from which its duration can be computed."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


class _NotMixed(_TooFewSteps):
    """A prompt had its first token only after the decodes that it joined."""


def _mean_step(tokens_s: Sequence[float], start_s: float, end_s: float) -> tuple[int, float]:
    """Return the number of steps between two times, and their mean duration."""
    inside = tokens_s[bisect_left(tokens_s, start_s) : bisect_right(tokens_s, end_s)]
    steps = len(inside) - 1
    apart = len(set(inside)) - 1  # tokens that a late client reads together look like one
    if apart < _STEPS_MIN:
        raise _TooFewSteps(max(0, apart))
    return steps, (inside[-1] - inside[0]) / steps


def _compute_mixed_step(
    runs: Sequence[TokenTimes], joining: Sequence[TokenTimes], *, tokens: int, context: int
) -> MixedMeasurement:
    """Return the mean step with a joining prompt of `tokens`; the prompts of the batch have `context`.

    It is a step without one and the delay by each. Steps without one are measured before and after the
    others, so that an engine that becomes slower or faster in the meantime changes neither.
    """
    tokens_s, sent_s, end_s = runs[0].tokens_s, joining[0].sent_s, joining[-1].tokens_s[0]
    first, last = bisect_right(tokens_s, sent_s) - 1, bisect_left(tokens_s, end_s)
    if last >= len(tokens_s):
        raise _NotMixed(len(tokens_s) - first)
    _, before_s = _mean_step(tokens_s, max(run.tokens_s[0] for run in runs), sent_s)
    _, after_s = _mean_step(tokens_s, tokens_s[last], min(run.tokens_s[-1] for run in runs))
    alone_s = (before_s + after_s) / 2
    delay_s = (tokens_s[last] - tokens_s[first] - (last - first) * alone_s) / len(joining)
    decoded = sum(bisect_right(run.tokens_s, sent_s) + (last - first) / 2 for run in runs)
    context_tokens = len(runs) * context + decoded
    return MixedMeasurement(tokens, alone_s + max(delay_s, 0.0), len(runs), context_tokens)


def _take_median(samples: Sequence[M]) -> M:
    """Return the one with the median of the durations."""
    return sorted(samples, key=lambda one: one.seconds)[len(samples) // 2]


def _watch_steps(runs: Sequence[TokenTimes], steps: int) -> asyncio.Event:
    """Return an event that is set `steps` steps after all runs have their first token."""
    settled = asyncio.Event()
    begun: list[int] = []

    def check() -> None:
        if not begun and all(run.tokens_s for run in runs):
            begun.append(len(runs[0].tokens_s))
        if begun and len(runs[0].tokens_s) >= begun[0] + steps:
            settled.set()

    for run in runs:
        run.on_token = check
    return settled


async def _run_all(measurements: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them at the same time; the first failure ends all."""
    tasks = [asyncio.ensure_future(each) for each in measurements]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
