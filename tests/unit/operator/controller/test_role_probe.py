"""The role probe derives the flip strategy from two responses, once for each container run."""

import json

import httpx
import pytest

from fulcrum_core.values import FlipStrategy
from fulcrum_operator.controller.pods.role_probe import ContainerRun, RoleProbes, probe_roles
from tests.waiting import advance

RELABEL, RESTART = FlipStrategy.RELABEL, FlipStrategy.RESTART


def engine(prefill: int | None, plain: int | None) -> httpx.AsyncClient:
    """An engine with these response statuses; None: it closes the connection."""

    def respond(request: httpx.Request) -> httpx.Response:
        status = prefill if "kv_transfer_params" in json.loads(request.content) else plain
        if status is None:
            raise httpx.ReadError("closed")
        return httpx.Response(status, json={})

    return httpx.AsyncClient(transport=httpx.MockTransport(respond), verify=False)


@pytest.mark.parametrize(
    ("prefill", "plain", "expected"),
    [
        (200, 200, RELABEL),
        (400, 200, RESTART),
        (200, 400, RESTART),
        (422, 200, RESTART),
        (400, 400, None),
        (200, 503, None),
        (503, 200, None),
        (None, 200, None),
        (400, None, None),
    ],
)
async def test_the_flip_strategy_follows_from_the_responses(
    prefill: int | None, plain: int | None, expected: FlipStrategy | None
) -> None:
    async with engine(prefill, plain) as client:
        assert await probe_roles(client, "192.0.2.1:8000", model="m", salt="s") is expected


class CountingProbes:
    """RoleProbes whose probes return the given outcomes in this order, then Relabel."""

    def __init__(self, *outcomes: FlipStrategy | None) -> None:
        self.outcomes, self.count, self.results = list(outcomes), 0, 0
        self.probes = RoleProbes(self._probe)

    async def _probe(self, _endpoint: str, _model: str) -> FlipStrategy | None:
        self.count += 1
        return self.outcomes.pop(0) if self.outcomes else RELABEL

    def probe(self, run: ContainerRun) -> None:
        self.probes.start(run, "192.0.2.1:8000", "m", on_result=self._on_result)

    def _on_result(self) -> None:
        self.results += 1


FIRST, SECOND = ContainerRun("pod", 0), ContainerRun("pod", 1)


@pytest.mark.looptime
async def test_each_container_run_is_probed_once() -> None:
    counting = CountingProbes()
    for _ in range(3):
        counting.probe(FIRST)
        await advance(1)
    counting.probe(SECOND)
    await advance(1)
    known = [counting.probes.result(run) for run in (FIRST, SECOND)]
    assert (counting.count, counting.results, known) == (2, 2, [None, RELABEL])


@pytest.mark.looptime
async def test_a_probe_without_a_result_is_repeated() -> None:
    counting = CountingProbes(None, None, RESTART)
    counting.probe(FIRST)
    await advance(10)
    assert (counting.count, counting.results, counting.probes.result(FIRST)) == (3, 1, RESTART)


@pytest.mark.looptime
async def test_a_deleted_pod_is_no_longer_probed() -> None:
    counting = CountingProbes(*[None] * 1000)
    counting.probe(FIRST)
    await advance(5)
    counting.probes.forget("pod")
    before = counting.count
    await advance(100)
    assert counting.count == before


@pytest.mark.looptime
async def test_an_engine_that_crashes_at_every_probe_has_only_one_probe_running() -> None:
    counting = CountingProbes(*[None] * 1000)
    for restarts in range(20):
        counting.probe(ContainerRun("pod", restarts))
        await advance(1)
    before = counting.count
    await advance(100)
    assert counting.count - before <= 100 / 10 + 5


@pytest.mark.looptime
async def test_an_adopted_result_is_not_probed_again() -> None:
    counting = CountingProbes()
    counting.probes.adopt(FIRST, RESTART)
    counting.probe(FIRST)
    await advance(1)
    assert (counting.count, counting.probes.result(FIRST)) == (0, RESTART)
