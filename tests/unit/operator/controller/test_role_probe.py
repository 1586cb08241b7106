"""The canary: what an engine's answers say of how it flips, and that it is asked once in each life."""

import asyncio
import json

import httpx
import pytest

from fulcrum_core.values import FlipStrategy
from fulcrum_operator.controller.pods.role_probe import Life, Probes, probe

RELABEL, RESTART = FlipStrategy.RELABEL, FlipStrategy.RESTART


def engine(prefill: int | None, plain: int | None) -> httpx.AsyncClient:
    """An engine that answers the two legs with these statuses; None: it breaks the connection."""

    def answer(request: httpx.Request) -> httpx.Response:
        status = prefill if "kv_transfer_params" in json.loads(request.content) else plain
        if status is None:
            raise httpx.ReadError("gone")
        return httpx.Response(status, json={})

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), verify=False)


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
async def test_answers_say_how_an_engine_flips(
    prefill: int | None, plain: int | None, expected: FlipStrategy | None
) -> None:
    async with engine(prefill, plain) as client:
        assert await probe(client, "192.0.2.1:8000", model="m", salt="s") is expected


class Asked:
    """Probes whose engines answer what is laid out here, in this order; then Relabel."""

    def __init__(self, *answers: FlipStrategy | None) -> None:
        self.answers, self.count, self.told = list(answers), 0, 0
        self.probes = Probes(self._ask)

    async def _ask(self, _endpoint: str, _model: str) -> FlipStrategy | None:
        self.count += 1
        return self.answers.pop(0) if self.answers else RELABEL

    def want(self, life: Life) -> None:
        self.probes.want(life, "192.0.2.1:8000", "m", then=self._then)

    def _then(self) -> None:
        self.told += 1


FIRST, SECOND = Life("pod", 0), Life("pod", 1)


@pytest.mark.looptime
async def test_each_life_is_asked_once() -> None:
    asked = Asked()
    for _ in range(3):
        asked.want(FIRST)
        await asyncio.sleep(1)
    asked.want(SECOND)
    await asyncio.sleep(1)
    known = [asked.probes.known(life) for life in (FIRST, SECOND)]
    assert (asked.count, asked.told, known) == (2, 2, [None, RELABEL])


@pytest.mark.looptime
async def test_an_engine_that_does_not_answer_is_asked_again() -> None:
    asked = Asked(None, None, RESTART)
    asked.want(FIRST)
    await asyncio.sleep(10)
    assert (asked.count, asked.told, asked.probes.known(FIRST)) == (3, 1, RESTART)


@pytest.mark.looptime
async def test_a_pod_that_is_gone_is_asked_no_more() -> None:
    asked = Asked(*[None] * 1000)
    asked.want(FIRST)
    await asyncio.sleep(5)
    asked.probes.forget("pod")
    before = asked.count
    await asyncio.sleep(100)
    assert asked.count == before


@pytest.mark.looptime
async def test_an_engine_that_ends_at_each_canary_is_not_asked_once_more_for_each_life() -> None:
    asked = Asked(*[None] * 1000)
    for restarts in range(20):
        asked.want(Life("pod", restarts))
        await asyncio.sleep(1)
    before = asked.count
    await asyncio.sleep(100)
    assert asked.count - before <= 100 / 10 + 5


@pytest.mark.looptime
async def test_what_an_earlier_operator_learnt_is_not_asked_again() -> None:
    asked = Asked()
    asked.probes.adopt(FIRST, RESTART)
    asked.want(FIRST)
    await asyncio.sleep(1)
    assert (asked.count, asked.probes.known(FIRST)) == (0, RESTART)
