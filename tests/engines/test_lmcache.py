"""Real engines with LMCache's tiers beside NIXL: what an engine has forgotten comes back from memory."""

import random
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Figure
from tests.engines.asking import Ask, alone, ask, prompts
from tests.engines.real import RealService, Services, Up, manifest

pytestmark = pytest.mark.timeout(900)

REQUESTS, FLIPS = 60, 6
HITS = "lmcache_mp_lookup_hit_tokens_total"


@pytest.fixture(scope="module")
def tiers_up(services: Services, beside: None) -> Iterator[Up]:  # noqa: ARG001
    """Two engines with a cache server each."""
    tiers = manifest(kvTransfer={"connector": "NIXLWithLMCache"}, kvCache={"cpu": "256Mi"})
    yield services.up("tiers", tiers)
    services.let_go("tiers")


@pytest.fixture
async def tiers(tiers_up: Up) -> AsyncIterator[RealService]:
    """The engines, at rest."""
    async with tiers_up.opened() as service:
        yield service


async def test_second_turns_find_their_first_in_memory_while_roles_flip(
    tiers: RealService, figure: Figure, rng: random.Random
) -> None:
    first = [
        Ask(prompt, 8, chat=n % 2 == 1) for n, prompt in enumerate(prompts(rng, REQUESTS // 2, (110, 140)))
    ]
    wrong = await asked_and_wrong(tiers, first)
    await forget(tiers)
    before = await hits(tiers)
    second = [replace(one, prompt=f"{one.prompt} and then? {rng.random()}") for one in first]
    wrong += await asked_and_wrong(tiers, second)
    found = await hits(tiers) - before
    figure(
        f"NIXL with LMCache: {REQUESTS} requests, {FLIPS} swaps of both roles, {len(wrong)} wrong or failed; "
        f"second turns found {found:.0f} tokens in memory"
    )
    assert wrong == []
    assert found >= 256 * REQUESTS / 4  # a chunk for half of them, at least


async def asked_and_wrong(tiers: RealService, asked: list[Ask]) -> list[str]:
    """Ask them all with half of the flips on the way; what was not right."""
    wrong = []
    for number, one in enumerate(asked):
        if number % (len(asked) // (FLIPS // 2)) == 5:
            await tiers.swap()
        answer = await ask(tiers.client, tiers.url, one)
        expected = await alone(tiers.client, await tiers.engine_url("chat-0"), one)
        if (answer.status, answer.tokens) != (200, expected):
            wrong.append(f"{answer} instead of {expected}")
    return wrong


async def forget(tiers: RealService) -> None:
    """The engines' own caches are empty afterwards; the tiers' are not."""
    for name in ("chat-0", "chat-1"):
        answer = await tiers.client.post(f"{await tiers.engine_url(name)}/reset_prefix_cache")
        answer.raise_for_status()


async def hits(tiers: RealService) -> float:
    """Tokens that both cache servers were asked for and had."""
    total = 0.0
    for name in ("chat-0", "chat-1"):
        said = Path(f"/proc/{await tiers.leader(name)}/cmdline").read_text(encoding="utf-8")
        port = re.findall(r"--http-port (\d+)", said)[0]
        text = (await tiers.client.get(f"http://127.0.0.1:{port}/metrics")).text
        total += sum(float(value) for value in re.findall(rf"^{HITS}\S* (\S+)$", text, re.MULTILINE))
    return total
