"""The canary: which roles an engine takes, asked of the engine itself, once in each of its lives.

A prefill leg and a plain completion of one token. An engine that serves both takes its role from each
request; one that refuses one of them was started for the other. Versions are never sniffed.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
import structlog

from fulcrum_core.values import FlipStrategy

_ANSWER_S = 10.0
_AT_ONCE = 16
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 10.0
_PROMPT = "fulcrum canary {salt}: " + "is anybody there? " * 8
"""Longer than a KV block, and new each time: nothing of it is cached."""
_HAND_OFF = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
_REFUSED = frozenset({400, 422})

_log = structlog.get_logger()


async def probe(client: httpx.AsyncClient, endpoint: str, *, model: str, salt: str) -> FlipStrategy | None:
    """How the engine at `host:port` can change its role; None if it does not say."""
    prompt = _PROMPT.format(salt=salt)
    plain = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    prefill, completion = [await _asked(client, endpoint, body) for body in (plain | _HAND_OFF, plain)]
    if prefill and completion:
        return FlipStrategy.RELABEL
    if prefill is None or completion is None or not (prefill or completion):
        return None
    return FlipStrategy.RESTART


async def _asked(client: httpx.AsyncClient, endpoint: str, body: dict[str, object]) -> bool | None:
    """Whether the engine serves such a request; None if it neither serves nor refuses it."""
    try:
        answer = await client.post(f"http://{endpoint}/v1/completions", json=body, timeout=_ANSWER_S)
    except httpx.HTTPError:
        return None
    if answer.is_success:
        return True
    return False if answer.status_code in _REFUSED else None


@dataclass(frozen=True, slots=True)
class Life:
    """One life of an engine: its pod's identity and how often its container was started again."""

    pod: str
    restarts: int


class Probes:
    """The answers of engines by their lives, each asked for once; to be closed.

    Args:
        ask: Asks the engine at this endpoint for a model.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        ask: Callable[[str, str], Awaitable[FlipStrategy | None]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._ask, self._sleep = ask, sleep
        self._known: dict[Life, FlipStrategy] = {}
        self._asking: dict[Life, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def known(self, life: Life) -> FlipStrategy | None:
        """What the engine answered in this life; None if it has not."""
        return self._known.get(life)

    def adopt(self, life: Life, strategy: FlipStrategy) -> None:
        """Take over what an earlier operator was answered."""
        self._known.setdefault(life, strategy)

    def want(self, life: Life, endpoint: str, model: str, *, then: Callable[[], None]) -> None:
        """Ask until the engine answers; `then` is called when it has. Asked already: nothing happens.

        The pod's earlier lives are over: an engine that ends at each canary is not asked once more for each.
        """
        if life in self._known or life in self._asking:
            return
        self.forget(life.pod)
        task = asyncio.get_running_loop().create_task(self._until_answered(life, endpoint, model, then))
        self._asking[life] = task

    def forget(self, pod: str) -> None:
        """A pod is gone, or has begun another life."""
        for life in [life for life in (*self._known, *self._asking) if life.pod == pod]:
            self._known.pop(life, None)
            task = self._asking.pop(life, None)
            if task is not None:
                task.cancel()

    async def aclose(self) -> None:
        """Stop asking."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_answered(self, life: Life, endpoint: str, model: str, then: Callable[[], None]) -> None:
        for attempt in itertools.count():
            async with self._turns:
                answer = await self._ask(endpoint, model)
            if answer is not None:
                self._known[life] = answer
                del self._asking[life]
                _log.info("engine probed", endpoint=endpoint, strategy=str(answer))
                then()
                return
            await self._sleep(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempt, 10)))
