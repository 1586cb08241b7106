"""Role probe: finds which roles an engine accepts, once for each container run. Used by `pod_runtime`.

The probe is one prefill request and one completion of one token. An engine that serves both takes its role
from each request (Relabel); an engine that refuses one was started for the other role (Restart). The plan
writes the result into the PDInstance's status; after a restart of the operator, `pod_runtime` passes it
to `adopt`.
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
"""Prompt longer than a KV block, with a new salt each time, so that no part of it is cached."""
_PREFILL_ONLY = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
_REFUSED_STATUSES = frozenset({400, 422})

_log = structlog.get_logger()


async def probe_roles(
    client: httpx.AsyncClient, endpoint: str, *, model: str, salt: str
) -> FlipStrategy | None:
    """Probe how the engine at `host:port` can change its role; None without a clear result."""
    prompt = _PROMPT.format(salt=salt)
    plain = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    prefill, completion = [await _accepts(client, endpoint, body) for body in (plain | _PREFILL_ONLY, plain)]
    if prefill and completion:
        return FlipStrategy.RELABEL
    if prefill is None or completion is None or not (prefill or completion):
        return None
    return FlipStrategy.RESTART


async def _accepts(client: httpx.AsyncClient, endpoint: str, body: dict[str, object]) -> bool | None:
    """Whether the engine serves the request; None for a failure that says nothing about roles."""
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
    """One run of an engine's container: the pod's uid and the container's restart count."""

    pod_uid: str
    restarts: int


class RoleProbes:
    """Results of the role probes by container run. The owner calls `aclose`.

    Args:
        probe: Probes the engine at an endpoint, with a model's name.
    """

    def __init__(self, probe: Callable[[str, str], Awaitable[FlipStrategy | None]]) -> None:
        self._probe = probe
        self._results: dict[ContainerRun, FlipStrategy] = {}
        self._probing: dict[ContainerRun, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_CONCURRENCY_MAX)

    def result(self, run: ContainerRun) -> FlipStrategy | None:
        """Return the flip strategy found for this container run; None if there is no result yet."""
        return self._results.get(run)

    def adopt(self, run: ContainerRun, strategy: FlipStrategy) -> None:
        """Use the result that an earlier operator process found, unless there is a result already."""
        self._results.setdefault(run, strategy)

    def start(self, run: ContainerRun, endpoint: str, model: str, *, on_result: Callable[[], None]) -> None:
        """Start to probe until there is a result, then call `on_result` once.

        Does nothing if this run has a result or is being probed. Probes of earlier runs of the pod are
        cancelled, so that at most one probe per pod is running.
        """
        if run in self._results or run in self._probing:
            return
        self.forget(run.pod_uid)
        task = asyncio.get_running_loop().create_task(
            self._probe_until_result(run, endpoint, model, on_result)
        )
        self._probing[run] = task

    def forget(self, pod_uid: str) -> None:
        """Cancel the probes and drop the results of a pod."""
        for run in [run for run in (*self._results, *self._probing) if run.pod_uid == pod_uid]:
            self._results.pop(run, None)
            task = self._probing.pop(run, None)
            if task is not None:
                task.cancel()

    async def aclose(self) -> None:
        """Cancel all probes."""
        tasks = list(self._probing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_until_result(
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
            await asyncio.sleep(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempt, 10)))
