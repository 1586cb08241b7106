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

_RESPONSE_TIMEOUT_S = 10.0
_CONCURRENCY_MAX = 16
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 10.0
_PROMPT = "fulcrum role probe {salt}: " + "is anybody there? " * 8
"""Longer than a KV block, and new each time: nothing of it is cached."""
_PREFILL_ONLY = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
_REFUSED_STATUSES = frozenset({400, 422})

_log = structlog.get_logger()


async def probe_roles(
    client: httpx.AsyncClient, endpoint: str, *, model: str, salt: str
) -> FlipStrategy | None:
    """How the engine at `host:port` can change its role; None if it does not say."""
    prompt = _PROMPT.format(salt=salt)
    plain = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    prefill, completion = [await _accepts(client, endpoint, body) for body in (plain | _PREFILL_ONLY, plain)]
    if prefill and completion:
        return FlipStrategy.RELABEL
    if prefill is None or completion is None or not (prefill or completion):
        return None
    return FlipStrategy.RESTART


async def _accepts(client: httpx.AsyncClient, endpoint: str, body: dict[str, object]) -> bool | None:
    """Whether the engine serves such a request; None if it neither serves nor refuses it."""
    try:
        response = await client.post(
            f"http://{endpoint}/v1/completions", json=body, timeout=_RESPONSE_TIMEOUT_S
        )
    except httpx.HTTPError:
        return None
    if response.is_success:
        return True
    return False if response.status_code in _REFUSED_STATUSES else None


@dataclass(frozen=True, slots=True)
class ContainerRun:
    """One life of an engine: its pod's identity and how often its container was started again."""

    pod_uid: str
    restarts: int


class RoleProbes:
    """The answers of engines by their lives, each asked for once; to be closed.

    Args:
        probe: Asks the engine at this endpoint for a model.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        probe: Callable[[str, str], Awaitable[FlipStrategy | None]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._probe, self._sleep = probe, sleep
        self._results: dict[ContainerRun, FlipStrategy] = {}
        self._probing: dict[ContainerRun, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_CONCURRENCY_MAX)

    def result(self, run: ContainerRun) -> FlipStrategy | None:
        """What the engine answered in this life; None if it has not."""
        return self._results.get(run)

    def adopt(self, run: ContainerRun, strategy: FlipStrategy) -> None:
        """Take over what an earlier operator was answered."""
        self._results.setdefault(run, strategy)

    def request(self, run: ContainerRun, endpoint: str, model: str, *, on_result: Callable[[], None]) -> None:
        """Ask until the engine answers; `on_result` is called when it has. Asked already: nothing happens.

        The pod's earlier lives are over: an engine that ends at each canary is not asked once more for each.
        """
        if run in self._results or run in self._probing:
            return
        self.forget(run.pod_uid)
        task = asyncio.get_running_loop().create_task(
            self._probe_until_answered(run, endpoint, model, on_result)
        )
        self._probing[run] = task

    def forget(self, pod_uid: str) -> None:
        """A pod is gone, or has begun another life."""
        for run in [run for run in (*self._results, *self._probing) if run.pod_uid == pod_uid]:
            self._results.pop(run, None)
            task = self._probing.pop(run, None)
            if task is not None:
                task.cancel()

    async def aclose(self) -> None:
        """Stop asking."""
        tasks = list(self._probing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_until_answered(
        self, run: ContainerRun, endpoint: str, model: str, on_result: Callable[[], None]
    ) -> None:
        for attempt in itertools.count():
            async with self._slots:
                strategy = await self._probe(endpoint, model)
            if strategy is not None:
                self._results[run] = strategy
                del self._probing[run]
                _log.info("engine probed", endpoint=endpoint, strategy=str(strategy))
                on_result()
                return
            await self._sleep(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempt, 10)))
