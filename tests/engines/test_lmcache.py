"""Real engines with NIXL and LMCache: blocks that an engine has dropped are read back from memory."""

import random
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import RecordMeasurement
from tests.engines.completions import CompletionRequest, compute_reference_tokens, generate_prompts, send
from tests.engines.services import LocalServices, RunningService, VllmService, build_manifest

pytestmark = pytest.mark.timeout(900)

REQUESTS, FLIPS = 60, 6
CACHE_HITS_METRIC = "lmcache_mp_lookup_hit_tokens_total"


@pytest.fixture(scope="module")
def tiers_service(services: LocalServices, start_older_engine_early: None) -> Iterator[RunningService]:  # noqa: ARG001
    """Two engines with a cache server each."""
    tiers = build_manifest(kvTransfer={"connector": "NIXLWithLMCache"}, kvCache={"cpu": "256Mi"})
    yield services.start("tiers", tiers)
    services.stop("tiers")


@pytest.fixture
async def tiers(tiers_service: RunningService) -> AsyncIterator[VllmService]:
    """The engines with LMCache; idle before each test."""
    async with tiers_service.connect() as service:
        yield service


async def test_second_turns_hit_the_lmcache_tier_while_roles_flip(
    tiers: VllmService, record_measurement: RecordMeasurement, rng: random.Random
) -> None:
    first = [
        CompletionRequest(prompt, 8, chat=n % 2 == 1)
        for n, prompt in enumerate(generate_prompts(rng, REQUESTS // 2, (110, 140)))
    ]
    wrong = await send_and_collect_errors(tiers, first)
    await reset_prefix_caches(tiers)
    before = await count_cache_hits(tiers)
    second = [replace(one, prompt=f"{one.prompt} and then? {rng.random()}") for one in first]
    wrong += await send_and_collect_errors(tiers, second)
    found = await count_cache_hits(tiers) - before
    record_measurement(
        f"NIXL with LMCache: {REQUESTS} requests, {FLIPS} swaps of both roles, {len(wrong)} wrong or failed; "
        f"second turns found {found:.0f} tokens in memory"
    )
    assert wrong == []
    assert found >= 256 * REQUESTS / 4  # a chunk for half of them, at least


async def send_and_collect_errors(tiers: VllmService, requests: list[CompletionRequest]) -> list[str]:
    """Send all requests, with half of the flips meanwhile; return the wrong responses as text."""
    wrong = []
    for number, one in enumerate(requests):
        if number % (len(requests) // (FLIPS // 2)) == 5:
            await tiers.swap_roles()
        response = await send(tiers.client, tiers.url, one)
        expected = await compute_reference_tokens(tiers.client, await tiers.engine_url("chat-0"), one)
        if (response.status, response.tokens) != (200, expected):
            wrong.append(f"{response} instead of {expected}")
    return wrong


async def reset_prefix_caches(tiers: VllmService) -> None:
    """Empty the engines' own prefix caches, not LMCache's."""
    for name in ("chat-0", "chat-1"):
        response = await tiers.client.post(f"{await tiers.engine_url(name)}/reset_prefix_cache")
        response.raise_for_status()


async def count_cache_hits(tiers: VllmService) -> float:
    """Return the tokens that both cache servers looked up and found."""
    total = 0.0
    for name in ("chat-0", "chat-1"):
        command_line = Path(f"/proc/{await tiers.find_leader_pid(name)}/cmdline").read_text(encoding="utf-8")
        port = re.findall(r"--http-port (\d+)", command_line)[0]
        text = (await tiers.client.get(f"http://127.0.0.1:{port}/metrics")).text
        total += sum(
            float(value) for value in re.findall(rf"^{CACHE_HITS_METRIC}\S* (\S+)$", text, re.MULTILINE)
        )
    return total
