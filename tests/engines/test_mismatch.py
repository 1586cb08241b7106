"""Engines that cannot read each other's KV: not paired by what is known of them, and right answers if paired.

What vLLM 0.32 does with such a pair, seen here on CPUs:

* Another version, and whatever else is in its compatibility hash (model spelling, data types, attention back
  end): decode refuses the handshake at once, every time, and computes the prompt. Right tokens.
* Prefill has larger blocks than decode: an assertion in the handshake, and the same.
* Prefill has *smaller* blocks than decode: handshake and transfer succeed, decode's usage says that it was
  given all, nothing is counted as failed, and the tokens are wrong. Block sizes are not in the hash. So for
  the size of its blocks the router takes the engine's own word, from its metrics, over everybody's.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api import PDService
from fulcrum_core.transfer import can_transfer
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.status.kv_transfer_verified import kv_transfer
from fulcrum_router.control.state_port import picture
from fulcrum_router.policy import Proof
from tests.conftest import Figure
from tests.engines.asking import alone, ask
from tests.engines.older import VERSION
from tests.engines.own_router import (
    Member,
    OwnRouter,
    Twin,
    handed_by_hand,
    ids,
    members_of,
    of_ids,
    own_router,
)
from tests.engines.real import NAMESPACE, D, P, RealService
from tests.engines.short import BLOCK as SMALLER

pytestmark = pytest.mark.timeout(600)

BLOCK = 128
LENGTHS = (2 * BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 60, 70, 64, 65)


@pytest.fixture
async def engine(pair: RealService) -> Member:
    """One of the pair's."""
    return (await members_of(pair))[0]


@pytest.fixture
def older(older_begun: Twin, engine: Member) -> Iterator[Member]:
    """The other version, as what it is."""
    assert engine.identity is not None
    older_begun.wait()
    yield Member("older", D, older_begun.port, replace(engine.identity, engine=f"vllm {VERSION}"))
    assert older_begun.runs()


@pytest.fixture
async def smaller(short: RealService) -> Member:
    """One with smaller blocks, as what it is."""
    return replace((await members_of(short))[0], name="smaller")


def in_roles(engine: Member, other: Member, *, gives: bool, lie: bool) -> tuple[Member, Member]:
    """Prefill and decode; with `lie` as if both were alike."""
    other = replace(other, identity=engine.identity) if lie else other
    prefill, decode = (other, engine) if gives else (engine, other)
    return replace(prefill, role=P), replace(decode, role=D)


REFUSALS = {
    "smaller": "block size differs: prefill has 128, decode has 64",
    "older": "engine differs: prefill has vllm 0.32.0, decode has vllm 0.31.0",
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_engines_that_are_known_to_differ_are_not_paired(
    pair: RealService, engine: Member, smaller: Member, older: Member, rng: random.Random, name: str
) -> None:
    """The size of blocks stands in the user's own arguments here."""
    other = {"smaller": smaller, "older": older}[name]
    prefill, decode = in_roles(engine, other, gives=False, lie=False)
    assert prefill.identity is not None
    assert decode.identity is not None
    assert can_transfer(prefill.identity, decode.identity).reason == REFUSALS[name]
    async with own_router(prefill, decode) as own, own.canaries(rng):
        await not_paired(pair, own, decode, of_ids(ids(rng, 2 * BLOCK + 5)))


async def not_paired(pair: RealService, own: OwnRouter, decode: Member, asked: Any) -> None:
    """Decode computes it, and nothing is handed over, by canaries neither."""
    answer = await own.ask(asked)
    assert (answer.status, answer.decode, answer.local) == (200, decode.name, "no_prefill_instance")
    assert dict(own.router.pairs.pairs) == {}
    assert answer.tokens == await alone(pair.client, decode.url, asked)


@pytest.mark.parametrize("gives", [False, True], ids=["reads", "gives"])
async def test_a_block_size_that_is_told_wrong_is_found_out_by_the_engines_own_word(
    pair: RealService, engine: Member, smaller: Member, figure: Figure, rng: random.Random, *, gives: bool
) -> None:
    prefill, decode = in_roles(engine, smaller, gives=gives, lie=True)
    bare = of_ids(ids(rng, 2 * BLOCK + 5))
    unguarded = await handed_by_hand(pair.client, prefill, decode, bare)
    wrong = unguarded.tokens != await alone(pair.client, decode.url, bare)
    cached = (unguarded.usage or {})["prompt_tokens_details"]
    figure(
        f"blocks of {BLOCK} and {SMALLER}, smaller {'gives' if gives else 'reads'}: "
        f"{unguarded.status}, {'wrong' if wrong else 'right'} tokens, {cached}"
    )
    assert (unguarded.status, wrong) == (200, gives)  # so the hazard is there
    async with own_router(prefill, decode) as own:
        await pair.until(lambda: _read(own))
        for length in LENGTHS:
            await not_paired(pair, own, decode, of_ids(ids(rng, length), stream=length % 2 == 0))


async def _read(own: OwnRouter) -> bool:
    """Whether both have told something of themselves."""
    return all(instance.kv_expired is not None for instance in own.router.fleet.all)


@pytest.mark.parametrize("gives", [False, True], ids=["reads", "gives"])
async def test_engines_that_refuse_each_other_give_right_tokens_and_are_told_apart(
    pair: RealService, engine: Member, older: Member, rng: random.Random, *, gives: bool
) -> None:
    """Paired by a version that is told wrong. Nothing counts as proven, whatever decode had cached."""
    prefill, decode = in_roles(engine, older, gives=gives, lie=True)
    known = ids(rng, BLOCK)
    await ask(pair.client, decode.url, of_ids([*known, *ids(rng, 9)], 1))
    prompts = [*(ids(rng, length) for length in LENGTHS), [*known, *ids(rng, BLOCK + 1)]]
    asked = [of_ids(prompt, stream=number % 2 == 0) for number, prompt in enumerate(prompts)]
    async with own_router(prefill, decode) as own:
        answers = [await own.ask(one) for one in asked]
        counts = await own.counts(prefill.name, decode.name, len(asked))
        told = await condition(pair, own, prefill.name, decode.name)
    expected = [await alone(pair.client, decode.url, one) for one in asked]
    assert [(answer.status, answer.tokens) for answer in answers] == [(200, right) for right in expected]
    assert counts == {Proof.PROVEN: 0, Proof.RECOMPUTED: len(asked), Proof.UNKNOWN: 0}
    assert told == ("False", "NotCompatible")


async def condition(pair: RealService, own: OwnRouter, *names: str) -> tuple[str, str]:
    """What the operator would say of a service with these two instances."""
    instances = tuple((await pair.instances()).values())
    seen = Observed(
        service=await pair.store.get(PDService, "chat", namespace=NAMESPACE),
        now_s=time.time(),
        instances=tuple(
            one.replace(metadata=one.metadata.model_copy(update={"name": name}))
            for one, name in zip(instances, names, strict=True)
        ),
        router=picture(own.router, now_s=time.time()),
    )
    found = kv_transfer(seen, wanted=2)
    return found.status, found.reason
