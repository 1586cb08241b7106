"""Real engines with NIXL and LMCache: KV that is no longer in the prefix cache is read from LMCache."""

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
def lmcache_service(services: LocalServices, start_older_engine_early: None) -> Iterator[RunningService]:  # noqa: ARG001
    """A service of two engines, each with its own LMCache server."""
    manifest = build_manifest(kvTransfer={"connector": "NIXLWithLMCache"}, kvCache={"cpu": "256Mi"})
    yield services.start("lmcache", manifest)
    services.stop("lmcache")


@pytest.fixture
async def service(lmcache_service: RunningService) -> AsyncIterator[VllmService]:
    """The service with LMCache; idle before each test."""
    async with lmcache_service.connect() as service:
        yield service


async def test_second_turns_hit_the_lmcache_tier_while_roles_flip(
    service: VllmService, record_measurement: RecordMeasurement, rng: random.Random
) -> None:
    first = [
        CompletionRequest(prompt, 8, chat=n % 2 == 1)
        for n, prompt in enumerate(generate_prompts(rng, REQUESTS // 2, (110, 140)))
    ]
    wrong = await send_and_collect_wrong(service, first)
    await reset_prefix_caches(service)
    before = await count_cache_hits(service)
    second = [replace(one, prompt=f"{one.prompt} and then? {rng.random()}") for one in first]
    wrong += await send_and_collect_wrong(service, second)
    found = await count_cache_hits(service) - before
    record_measurement(
        f"NIXL with LMCache: {REQUESTS} requests, {FLIPS} flips, {len(wrong)} wrong or failed; "
        f"second turns found {found:.0f} tokens in LMCache"
    )
    assert wrong == []
    assert found >= 256 * REQUESTS / 4  # one LMCache chunk (256 tokens) for half of the second turns


async def send_and_collect_wrong(service: VllmService, requests: list[CompletionRequest]) -> list[str]:
    """Send the requests one by one and flip both instances FLIPS / 2 times; return the wrong responses."""
    wrong = []
    for number, one in enumerate(requests):
        if number % (len(requests) // (FLIPS // 2)) == 5:
            await service.flip_both()
        response = await send(service.client, service.url, one)
        expected = await compute_reference_tokens(service.client, await service.engine_url("chat-0"), one)
        if (response.status, response.tokens) != (200, expected):
            wrong.append(f"{response} instead of {expected}")
    return wrong


async def reset_prefix_caches(service: VllmService) -> None:
    """Empty the engines' own prefix caches, not LMCache's."""
    for name in ("chat-0", "chat-1"):
        response = await service.client.post(f"{await service.engine_url(name)}/reset_prefix_cache")
        response.raise_for_status()


async def count_cache_hits(service: VllmService) -> float:
    """Return how many tokens were found in the two LMCache servers since their start, together."""
    total = 0.0
    for name in ("chat-0", "chat-1"):
        command_line = Path(f"/proc/{await service.find_leader_pid(name)}/cmdline").read_text(
            encoding="utf-8"
        )
        port = re.findall(r"--http-port (\d+)", command_line)[0]
        text = (await service.client.get(f"http://127.0.0.1:{port}/metrics")).text
        total += sum(
            float(value) for value in re.findall(rf"^{CACHE_HITS_METRIC}\S* (\S+)$", text, re.MULTILINE)
        )
    return total
