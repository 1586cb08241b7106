"""A flood of the lowest tier over engine servers: it gets 429s, premium requests keep their objectives."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import aiohttp
import pytest
import yaml

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import AdmissionMode, Slo
from fulcrum_router.counters import RequestOutcome
from fulcrum_router.policy.tiers.admission import TierAdmission
from fulcrum_router.settings import Tier
from tests.integration.router.fake_engines import route_to_servers
from tests.integration.simulator.servers import MODEL, Server, launch, prompt_of, ready

SLO = Slo(ttft_s=2.0, tpot_s=0.5)
PREMIUM = Tier("premium", SLO, -10, TierAdmission(sheddable=False))
FREE = Tier("free", SLO, 10)
PROMPT_TOKENS = 800
"""0.1 s of prefill."""
FLOOD = 150
PREMIUM_REQUESTS = 5


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """A prefill and a decode instance that compute 8,000 prompt tokens in a second."""
    quick = {"t0": 0.002, "b": 1.25e-4, "d1": 1e-4, "startup_s": 0.0, "weight_bytes": 100_000_000}
    path = tmp_path_factory.mktemp("profile") / "quick.yaml"
    path.write_text(yaml.safe_dump(load_profile("laptop").model_dump() | quick | {"name": "quick"}))
    processes = [launch(path), launch(path)]
    servers = dict(zip(("p1", "d1"), map(ready, processes), strict=True))
    yield servers
    for server in servers.values():
        server.kill()


async def test_a_flood_is_refused_and_premium_requests_keep_their_objectives(
    engines: dict[str, Server], client: aiohttp.ClientSession
) -> None:
    async with route_to_servers(engines, prefill=30.0, first_byte=30.0) as (router, url):
        assert router.settings is not None
        tiers = {tier.name: tier for tier in (PREMIUM, FREE)}
        settings = replace(router.settings, tiers=tiers, admission=AdmissionMode.ENFORCE, prefill_ahead_s=0.5)
        router.configure(settings, last_prefill_to_decode_s=None)
        refusals: list[tuple[str, int]] = []

        async def send(name: str, tier: str) -> int:
            prompt = prompt_of(name, PROMPT_TOKENS)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": True}
            async with client.post(url, json=body, headers={"x-customer-tier": tier}) as response:
                await response.read()
                if response.status == 429:
                    headers = response.headers
                    refusals.append((headers["x-fulcrum-refused"], int(headers["Retry-After"])))
                return response.status

        for number in range(5):  # the router learns how long a prompt takes
            await send(f"first {number}", "premium")
        flood = [asyncio.ensure_future(send(f"flood {number}", "free")) for number in range(FLOOD)]
        premium = [await send(f"premium {number}", "premium") for number in range(PREMIUM_REQUESTS)]
        statuses = Counter(await asyncio.gather(*flood))
        counters = router.counters.get_tier("premium")
        assert (premium, counters.slo_met) == ([200] * PREMIUM_REQUESTS, PREMIUM_REQUESTS + 5)
        assert statuses.keys() == {200, 429}
        assert statuses[429] > FLOOD / 2, f"15 s of work, an objective of 2 s: {statuses}"
        assert {reason for reason, _ in refusals} <= {"prefill_full", "waited_too_long"}
        assert all(1 <= retry_after_s <= 60 for _, retry_after_s in refusals)
        free = router.counters.get_tier("free")
        assert (free.offered, free.requests_by_outcome[RequestOutcome.REFUSED]) == (FLOOD, statuses[429])
