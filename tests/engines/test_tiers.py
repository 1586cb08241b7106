"""Two tiers on real engines: a flood of the lower one is partly refused, premium keeps its TTFT objective."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fulcrum_core.api import PDService
from fulcrum_core.api.qostier import QoSTier
from fulcrum_core.values import Slo
from fulcrum_simulator.client import LoadResults, OutcomeKind, summarize_latencies
from tests.conftest import RecordMeasurement
from tests.engines.loads import Sender, draw_load, send_load
from tests.engines.services import MODEL, NAMESPACE, RunningService, VllmService

pytestmark = pytest.mark.timeout(300)

PREMIUM, FREE = "premium", "free"
SLO = Slo(ttft_s=2.0, tpot_s=0.5)
LOAD_S = 8.0
LENGTHS: dict[str, Any] = {"prompt_tokens": (1_000, 2_000), "output_tokens": (2, 10)}
SENDERS = Sender(PREMIUM, 1.5, **LENGTHS), Sender(FREE, 75.0, **LENGTHS)
"""An idle core computes about 15 such prompts a second."""


async def test_premium_is_served_beside_a_flood_of_free_requests(
    pair: VllmService, pair_service: RunningService, record_measurement: RecordMeasurement, seed: int
) -> None:
    async with add_tiers(pair):
        waits_s = []
        for number in (1, 2):
            requests = draw_load(SENDERS[:number], end_s=LOAD_S, seed=str(seed))
            results = await send_load(pair_service.info, requests, slo=SLO, seed=2 * seed + number)
            waits_s.append(find_median_wait_s(results))
    outcomes = {tier: {one.kind for one in results.outcomes if one.tier == tier} for tier in (PREMIUM, FREE)}
    free = results.tiers[FREE]
    record_measurement(
        f"premium TTFT p50 {1000 * waits_s[0]:.0f} ms alone, {1000 * waits_s[1]:.0f} ms beside a flood: "
        f"{free.offered} free requests, {free.refused} refused"
    )
    assert outcomes == {PREMIUM: {OutcomeKind.OK}, FREE: {OutcomeKind.OK, OutcomeKind.REFUSED}}
    assert waits_s[1] < SLO.ttft_s / 2, f"premium's median TTFT beside the flood is {waits_s[1]:.2f} s"


def find_median_wait_s(results: LoadResults) -> float:
    """Median time to the first token of premium."""
    wait_s = summarize_latencies(one for one in results.outcomes if one.tier == PREMIUM).ttft_p50_s
    assert wait_s is not None, results.report().reasons
    return wait_s


@asynccontextmanager
async def add_tiers(service: VllmService) -> AsyncIterator[None]:
    """Give the running service two tiers and admission while the block runs."""
    for name, priority in ((PREMIUM, 10), (FREE, -10)):
        tier = {
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "priority": priority,
                "sheddable": name == FREE,
                "slo": {"ttft": f"{SLO.ttft_s:g}s", "tpot": f"{SLO.tpot_s:g}s"},
            },
        }
        await service.store.create(QoSTier.model_validate(tier))
    try:
        await set_tiers(service, [PREMIUM, FREE], admission="Enforce")
        await service.wait_until(lambda: _knows_tier(service, FREE))
        yield
    finally:
        await set_tiers(service, [], admission="Off")
        for name in (PREMIUM, FREE):
            await service.store.delete(QoSTier, name, namespace=NAMESPACE)


async def set_tiers(service: VllmService, tiers: list[str], *, admission: str) -> None:
    """Edit the service's tiers."""
    patch = {"spec": {"qosTiers": tiers, "router": {"admission": admission}}}
    await service.store.patch(PDService, "chat", patch, namespace=NAMESPACE)


async def _knows_tier(service: VllmService, tier: str) -> bool:
    """Whether the router has the tier: it names an unknown one in a response header."""
    body = {"model": MODEL, "prompt": [99], "max_tokens": 1}
    response = await service.client.post(
        f"{service.url}/v1/completions", json=body, headers={"x-customer-tier": tier}
    )
    return "x-fulcrum-tier" not in response.raise_for_status().headers
