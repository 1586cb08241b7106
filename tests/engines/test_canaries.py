"""Canaries on real engines: accepted, and without effect on client requests, even with the same prompt."""

import random
import re

import pytest

from fulcrum_router.policy import TransferOutcome
from tests.engines.completions import compute_reference_tokens, send
from tests.engines.in_process_router import (
    CANARY_TOKENS,
    RecordingRandom,
    build_token_request,
    generate_token_ids,
    list_engine_entries,
    run_in_process_router,
)
from tests.engines.services import VllmService

pytestmark = pytest.mark.timeout(600)


async def test_requests_with_the_prompt_of_a_canary_get_right_tokens_and_their_own_kv_transfer(
    pair: VllmService, rng: random.Random, seed: int
) -> None:
    """The engines accept a canary's token ids and priority: both directions are verified."""
    chosen = RecordingRandom(seed)
    prefill, decode = await list_engine_entries(pair)
    async with run_in_process_router(prefill, decode) as in_process:
        async with in_process.canaries(chosen):
            await in_process.wait_for_reasons("Verified")
        verified_pairs = in_process.router.pairs.pairs
        assert {(key, pair.counts[TransferOutcome.VERIFIED]) for key, pair in verified_pairs.items()} == {
            ((prefill.name, decode.name), 1),
            ((decode.name, prefill.name), 1),
        }
    prompt = chosen.drawn[:CANARY_TOKENS]
    for number, shared in enumerate(
        (prompt, [*prompt[:256], *generate_token_ids(rng, 80)], [*prompt, *generate_token_ids(rng, 200)])
    ):
        request = build_token_request(shared, stream=number == 1)
        expected = await compute_reference_tokens(pair.client, await pair.engine_url(decode.name), request)
        before = await read_computed_tokens(pair, prefill.name), await read_fetched_tokens(pair, decode.name)
        response = await send(pair.client, pair.url, request)
        after = await read_computed_tokens(pair, prefill.name), await read_fetched_tokens(pair, decode.name)
        assert (response.status, response.tokens, response.prefill) == (200, expected, prefill.name)
        if number == 0:  # the others share blocks with this one
            assert [now - then for now, then in zip(after, before, strict=True)] == [CANARY_TOKENS] * 2


async def read_computed_tokens(pair: VllmService, name: str) -> float:
    """Return the prompt tokens that the engine has computed."""
    return await _read_prompt_tokens(pair, name, "local_compute")


async def read_fetched_tokens(pair: VllmService, name: str) -> float:
    """Return the prompt tokens whose KV the engine has fetched."""
    return await _read_prompt_tokens(pair, name, "external_kv_transfer")


async def _read_prompt_tokens(pair: VllmService, name: str, source: str) -> float:
    text = (await pair.client.get(f"{await pair.engine_url(name)}/metrics")).text
    found = re.findall(
        rf'^vllm:prompt_tokens_by_source_total{{[^}}]*source="{source}"[^}}]*}} (\S+)$', text, re.MULTILINE
    )
    return sum(map(float, found))
