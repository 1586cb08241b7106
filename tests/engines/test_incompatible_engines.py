"""Engines that cannot read each other's KV are not paired; if they are paired by mistake, tokens are right.

What vLLM 0.32 does with such a pair, observed on CPUs:

* Different version, or another difference in its compatibility hash (model spelling, data types, attention
  backend): decode refuses each handshake at once and computes the prompt. Right tokens.
* Prefill has larger blocks than decode: an assertion fails in the handshake; otherwise the same.
* Prefill has *smaller* blocks than decode: handshake and transfer succeed, decode reports all tokens as
  cached, no failure is counted, and the tokens are wrong. Block sizes are not in the hash. Therefore the
  router trusts the block size in the engine's metrics over any declared one.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api import PDService
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.status.kv_transfer_verified import kv_transfer_verified
from fulcrum_router.control.state_port import build_router_state
from fulcrum_router.policy import TransferOutcome
from tests.conftest import RecordMeasurement
from tests.engines.completions import compute_reference_tokens, send
from tests.engines.in_process_router import (
    EngineEntry,
    ExtraEngine,
    InProcessRouter,
    build_token_request,
    generate_token_ids,
    list_engine_entries,
    run_in_process_router,
    transfer_kv_directly,
)
from tests.engines.older_vllm import OLDER_VLLM_VERSION
from tests.engines.services import NAMESPACE, D, P, VllmService
from tests.engines.short_lease import BLOCK as SMALLER_BLOCK

pytestmark = pytest.mark.timeout(600)

BLOCK = 128
PROMPT_LENGTHS = (2 * BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 60, 70, 64, 65)


@pytest.fixture
async def engine(pair: VllmService) -> EngineEntry:
    """The pair's prefill engine."""
    return (await list_engine_entries(pair))[0]


@pytest.fixture
def older(older_engine_starting: ExtraEngine, engine: EngineEntry) -> Iterator[EngineEntry]:
    """The engine with an older version, with its true identity."""
    assert engine.identity is not None
    older_engine_starting.wait_until_healthy()
    yield EngineEntry(
        "older", D, older_engine_starting.port, replace(engine.identity, engine=f"vllm {OLDER_VLLM_VERSION}")
    )
    assert older_engine_starting.is_running()


@pytest.fixture
async def smaller(short_lease: VllmService) -> EngineEntry:
    """An engine with smaller blocks, with its true identity."""
    return replace((await list_engine_entries(short_lease))[0], name="smaller")


def assign_roles(
    engine: EngineEntry, other: EngineEntry, *, other_prefills: bool, claim_same_identity: bool
) -> tuple[EngineEntry, EngineEntry]:
    """Return prefill and decode; with `claim_same_identity` the router believes both identities are equal."""
    other = replace(other, identity=engine.identity) if claim_same_identity else other
    prefill, decode = (other, engine) if other_prefills else (engine, other)
    return replace(prefill, role=P), replace(decode, role=D)


REFUSALS = {
    "smaller": "block size differs: prefill has 128, decode has 64",
    "older": "engine differs: prefill has vllm 0.32.0, decode has vllm 0.31.0",
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_engines_with_different_identities_are_not_paired(
    pair: VllmService,
    engine: EngineEntry,
    smaller: EngineEntry,
    older: EngineEntry,
    rng: random.Random,
    name: str,
) -> None:
    """The block size is in `engine.args` here."""
    other = {"smaller": smaller, "older": older}[name]
    prefill, decode = assign_roles(engine, other, other_prefills=False, claim_same_identity=False)
    assert prefill.identity is not None
    assert decode.identity is not None
    assert can_transfer(prefill.identity, decode.identity).reason == REFUSALS[name]
    async with run_in_process_router(prefill, decode) as in_process, in_process.canaries(rng):
        await assert_not_paired(
            pair, in_process, decode, build_token_request(generate_token_ids(rng, 2 * BLOCK + 5))
        )


async def assert_not_paired(
    pair: VllmService, in_process: InProcessRouter, decode: EngineEntry, request: Any
) -> None:
    """Decode computes the prompt; neither the request nor a canary transfers KV."""
    response = await in_process.send(request)
    assert (response.status, response.decode, response.local_prefill_reason) == (
        200,
        decode.name,
        "no_prefill_instance",
    )
    assert dict(in_process.router.pairs.pairs) == {}
    assert response.tokens == await compute_reference_tokens(pair.client, decode.url, request)


@pytest.mark.parametrize("other_prefills", [False, True], ids=["other decodes", "other prefills"])
async def test_wrong_declared_block_size_is_overruled_by_engine_metrics(
    pair: VllmService,
    engine: EngineEntry,
    smaller: EngineEntry,
    record_measurement: RecordMeasurement,
    rng: random.Random,
    *,
    other_prefills: bool,
) -> None:
    prefill, decode = assign_roles(engine, smaller, other_prefills=other_prefills, claim_same_identity=True)
    bare = build_token_request(generate_token_ids(rng, 2 * BLOCK + 5))
    unguarded = await transfer_kv_directly(pair.client, prefill, decode, bare)
    wrong = unguarded.tokens != await compute_reference_tokens(pair.client, decode.url, bare)
    cached = (unguarded.usage or {})["prompt_tokens_details"]
    record_measurement(
        f"blocks of {BLOCK} and {SMALLER_BLOCK}, smaller {'prefills' if other_prefills else 'decodes'}: "
        f"{unguarded.status}, {'wrong' if wrong else 'right'} tokens, {cached}"
    )
    assert (unguarded.status, wrong) == (200, other_prefills)  # the hazard is real
    async with run_in_process_router(prefill, decode) as in_process:
        await pair.wait_until(lambda: _metrics_were_read(in_process))
        for length in PROMPT_LENGTHS:
            await assert_not_paired(
                pair,
                in_process,
                decode,
                build_token_request(generate_token_ids(rng, length), stream=length % 2 == 0),
            )


async def _metrics_were_read(in_process: InProcessRouter) -> bool:
    """Whether the router has read the metrics of both engines."""
    return all(instance.expired_transfers is not None for instance in in_process.router.fleet.instances)


@pytest.mark.parametrize("other_prefills", [False, True], ids=["other decodes", "other prefills"])
async def test_engines_that_refuse_the_handshake_give_right_tokens_and_set_not_compatible(
    pair: VllmService, engine: EngineEntry, older: EngineEntry, rng: random.Random, *, other_prefills: bool
) -> None:
    """Paired, as one reports a wrong version. No transfer counts as verified, whatever decode cached."""
    prefill, decode = assign_roles(engine, older, other_prefills=other_prefills, claim_same_identity=True)
    known = generate_token_ids(rng, BLOCK)
    await send(pair.client, decode.url, build_token_request([*known, *generate_token_ids(rng, 9)], 1))
    prompts = [
        *(generate_token_ids(rng, length) for length in PROMPT_LENGTHS),
        [*known, *generate_token_ids(rng, BLOCK + 1)],
    ]
    requests = [build_token_request(prompt, stream=number % 2 == 0) for number, prompt in enumerate(prompts)]
    async with run_in_process_router(prefill, decode) as in_process:
        responses = [await in_process.send(one) for one in requests]
        counts = await in_process.wait_for_outcome_counts(prefill.name, decode.name, len(requests))
        condition = await compute_transfer_condition(pair, in_process, prefill.name, decode.name)
    expected = [await compute_reference_tokens(pair.client, decode.url, one) for one in requests]
    assert [(response.status, response.tokens) for response in responses] == [
        (200, right) for right in expected
    ]
    assert counts == {
        TransferOutcome.VERIFIED: 0,
        TransferOutcome.RECOMPUTED: len(requests),
        TransferOutcome.UNKNOWN: 0,
    }
    assert condition == ("False", "Incompatible")


async def compute_transfer_condition(
    pair: VllmService, in_process: InProcessRouter, *names: str
) -> tuple[str, str]:
    """Return status and reason of KVTransferVerified for a service with these two instances."""
    instances = tuple((await pair.list_instances()).values())
    seen = Observed(
        service=await pair.store.get(PDService, "chat", namespace=NAMESPACE),
        now_s=time.time(),
        instances=tuple(
            one.replace(metadata=one.metadata.model_copy(update={"name": name}))
            for one, name in zip(instances, names, strict=True)
        ),
        router=build_router_state(in_process.router, now_s=time.time()),
    )
    found = kv_transfer_verified(seen, desired_replicas=2)
    return found.status, found.reason
