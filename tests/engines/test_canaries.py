"""Canaries on real engines: accepted, and in nobody's way, also for whoever asks the very same."""

import random
import re

import pytest

from fulcrum_router.policy import Proof
from tests.engines.asking import alone, ask
from tests.engines.own_router import CANARY_TOKENS, Recording, ids, members_of, of_ids, own_router
from tests.engines.real import RealService

pytestmark = pytest.mark.timeout(600)


async def test_clients_that_share_a_canarys_prompt_get_right_tokens_from_kv_of_their_own(
    pair: RealService, rng: random.Random, seed: int
) -> None:
    """Its token ids and its priority are taken by the engines: both directions are proven."""
    chosen = Recording(seed)
    prefill, decode = await members_of(pair)
    async with own_router(prefill, decode) as own:
        async with own.canaries(chosen):
            await own.until_known("Proven")
        flown = own.router.pairs.pairs
        assert {(key, pair.counts[Proof.PROVEN]) for key, pair in flown.items()} == {
            ((prefill.name, decode.name), 1),
            ((decode.name, prefill.name), 1),
        }
    prompt = chosen.given[:CANARY_TOKENS]
    for number, shared in enumerate((prompt, [*prompt[:256], *ids(rng, 80)], [*prompt, *ids(rng, 200)])):
        asked = of_ids(shared, stream=number == 1)
        expected = await alone(pair.client, await pair.engine_url(decode.name), asked)
        before = await computed(pair, prefill.name), await fetched(pair, decode.name)
        answer = await ask(pair.client, pair.url, asked)
        after = await computed(pair, prefill.name), await fetched(pair, decode.name)
        assert (answer.status, answer.tokens, answer.prefill) == (200, expected, prefill.name)
        if number == 0:  # the others share blocks with this one
            assert [now - then for now, then in zip(after, before, strict=True)] == [CANARY_TOKENS] * 2


async def computed(pair: RealService, name: str) -> float:
    """Prompt tokens that the engine has computed."""
    return await _from(pair, name, "local_compute")


async def fetched(pair: RealService, name: str) -> float:
    """Prompt tokens whose KV it has fetched."""
    return await _from(pair, name, "external_kv_transfer")


async def _from(pair: RealService, name: str, source: str) -> float:
    text = (await pair.client.get(f"{await pair.engine_url(name)}/metrics")).text
    found = re.findall(
        rf'^vllm:prompt_tokens_by_source_total{{[^}}]*source="{source}"[^}}]*}} (\S+)$', text, re.MULTILINE
    )
    return sum(map(float, found))
