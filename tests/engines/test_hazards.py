"""What real engines do wrong, or what is done to them, and that a client sees none of it.

Each test names the hazard, and begins with both engines at rest.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from fulcrum_core.api import PDService
from fulcrum_core.state import RouterState
from fulcrum_core.values import Phase
from tests.conftest import Figure
from tests.engines.asking import Ask, Broken, alone, ask, events, prompts
from tests.engines.own_router import ids, of_ids
from tests.engines.real import NAMESPACE, START_S, D, P, RealService
from tests.engines.test_flips import first_token_s, listed_ms

pytestmark = pytest.mark.timeout(900)

LONG = Ask("count the clocks", 3000, stream=True)
"""Decode is at it for seconds."""
GENERATED = "vllm:generation_tokens_total"


def some(rng: random.Random, tokens: int = 12) -> Ask:
    """A prompt of a few blocks that nobody has seen."""
    return Ask(prompts(rng, 1, (80, 90))[0], tokens)


async def right(pair: RealService, asked: Ask, name: str) -> tuple[int, ...]:
    """What that engine answers by itself."""
    return await alone(pair.client, await pair.engine_url(name), asked)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"do_remote_prefill": True}, id="incomplete"),
        pytest.param({"do_remote_decode": True, "do_remote_prefill": False}, id="as the router's own"),
        pytest.param(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[0, 1]],
                "remote_engine_id": "x",
                "remote_request_id": "y",
                "remote_host": "127.0.0.1",
            },
            id="complete and pointing elsewhere",
        ),
        pytest.param("nonsense", id="no object"),
    ],
)
async def test_transfer_parameters_of_a_client_reach_no_engine(
    pair: RealService, rng: random.Random, params: object
) -> None:
    """Incomplete ones kill a real engine; others make it dial any address, or keep KV that nobody fetches.

    A hand-off of the router's stands in their place; several prompts at once have none.
    """
    leaders = [await pair.leader(await pair.engine(role)) for role in (P, D)]
    asked = some(rng)
    expected = await right(pair, asked, await pair.engine(D))
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        if isinstance(params, dict):
            params = {**params, "remote_port": elsewhere.getsockname()[1]}
        for prompt in (asked.prompt, [asked.prompt, "another"]):
            more = {"prompt": prompt, "kv_transfer_params": params}
            answer = await ask(pair.client, pair.url, replace(asked, more=more))
            assert (answer.status, answer.tokens) == (200, expected)
            assert json.loads(answer.text).get("kv_transfer_params") is None
        with pytest.raises(BlockingIOError):  # nobody has called
            elsewhere.accept()
    assert [await pair.leader(await pair.engine(role)) for role in (P, D)] == leaders


async def test_a_client_that_leaves_leaves_no_kv_behind(short: RealService, rng: random.Random) -> None:
    """In mid-stream, and between the legs: there prefill holds it until the lease is over."""
    decode, prefill = await short.engine(D), await short.engine(P)
    generated = await short.metric(decode, GENERATED)
    leaving = asyncio.create_task(ask(short.client, short.url, replace(LONG, tokens=1500)))
    await short.until(lambda: _above(short, decode, "vllm:num_requests_running", 0))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await short.until(lambda: _at_rest(short, decode))
    async with short.paused(decode):
        leaving = asyncio.create_task(ask(short.client, short.url, replace(some(rng), tokens=1500)))
        await short.until(lambda: _decodes(short, decode))
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    await short.until(lambda: _at_rest(short, decode))
    await short.until(lambda: _at_rest(short, prefill))
    assert await short.metric(decode, GENERATED) - generated < 1500


async def _above(pair: RealService, name: str, metric: str, value: float) -> bool:
    return await pair.metric(name, metric) > value


async def _at_rest(pair: RealService, name: str) -> bool:
    running = await pair.metric(name, "vllm:num_requests_running")
    return running == 0 and await pair.metric(name, "vllm:kv_cache_usage_perc") == 0


async def _decodes(pair: RealService, name: str, legs: int = 1) -> bool:
    return (await pair.of(name)).decode_requests >= legs


async def test_prefill_killed_between_the_legs_is_made_up_for_and_comes_back_as_another_engine(
    pair: RealService, rng: random.Random, figure: Figure
) -> None:
    """One prompt's KV lies with it, another one is computed. What its peer knew of its memory is not used."""
    prefill, decode = await pair.engine(P), await pair.engine(D)
    asked = some(rng), some(rng)
    expected = [await right(pair, one, decode) for one in asked]
    async with pair.stopped(decode):
        handed = asyncio.create_task(ask(pair.client, pair.url, asked[0]))
        await pair.until(lambda: _decodes(pair, decode))
        async with pair.stopped(prefill):
            computed = asyncio.create_task(ask(pair.client, pair.url, asked[1]))
            await pair.until(lambda: _prefills(pair, prefill))
            await pair.signal(prefill, signal.SIGKILL)
    began_s = time.monotonic()
    answers = [await handed, await computed]
    took_s = time.monotonic() - began_s
    assert [(answer.status, answer.tokens) for answer in answers] == [(200, tokens) for tokens in expected]
    assert await keeps_answering(pair, rng, decode) == 10
    before = await pair.state()
    await pair.at_rest()
    back_s = time.monotonic() - began_s
    await pair.until(lambda: _proven_anew(pair, before))
    figure(f"prefill killed between the legs: right answers after {took_s:.2f} s, back after {back_s:.0f} s")


async def _prefills(pair: RealService, name: str) -> bool:
    return (await pair.of(name)).prefill_tokens > 0


async def _proven_anew(pair: RealService, before: RouterState) -> bool:
    """Whether canaries have shown of both directions that KV moves."""
    proven = {(seen.prefill, seen.decode): seen.proven for seen in before.pairs}
    now = (await pair.state()).pairs
    return len(now) == 2 and all(seen.proven > proven[seen.prefill, seen.decode] for seen in now)


async def keeps_answering(pair: RealService, rng: random.Random, decode: str) -> int:
    """Ten requests now; how many of the answers are right."""
    asked = [some(rng) for _ in range(10)]
    answers = await asyncio.gather(*(ask(pair.client, pair.url, one) for one in asked))
    expected = [await right(pair, one, decode) for one in asked]
    return sum(
        answer.status == 200 and answer.tokens == tokens
        for answer, tokens in zip(answers, expected, strict=True)
    )


async def test_when_decode_is_killed_a_stream_ends_in_an_error_and_who_saw_nothing_gets_another(
    pair: RealService, rng: random.Random, figure: Figure
) -> None:
    prefill, decode = await pair.engine(P), await pair.engine(D)
    asked = some(rng)
    expected = await right(pair, asked, prefill)
    said: list[str] = []

    async def listen() -> None:
        async with pair.client.stream("POST", pair.url + LONG.path, json=LONG.body()) as answer:
            async for event in events(answer):
                said.append(event)  # noqa: PERF401  # what was said before the break counts

    stream = asyncio.create_task(listen())
    await pair.until(lambda: _above(pair, decode, "vllm:num_requests_running", 0))
    async with pair.stopped(decode):
        waiting = asyncio.create_task(ask(pair.client, pair.url, asked))
        await pair.until(lambda: _decodes(pair, decode, 2))
        await pair.signal(decode, signal.SIGKILL)
    answer = await waiting
    assert (answer.status, answer.tokens, answer.decode) == (200, expected, prefill)
    with pytest.raises(httpx.RemoteProtocolError):  # no end of chunks
        await stream
    error = json.loads(said[-1])["error"]
    assert (error["type"], error["code"], "[DONE]" in said) == ("upstream_error", 502, False)
    await pair.at_rest()
    waits_s = [await first_token_s(pair, rng) for _ in range(2)]  # one for each direction
    figure(f"flip right after a restart, decision to first correct token: {listed_ms(waits_s)} ms")


async def test_an_engine_that_hangs_is_passed_over_and_taken_back(
    pair: RealService, rng: random.Random, figure: Figure
) -> None:
    prefill, decode = await pair.engine(P), await pair.engine(D)
    asked = [some(rng) for _ in range(6)]
    expected = [await right(pair, one, prefill) for one in asked]
    async with pair.stopped(decode):
        began_s = time.monotonic()
        async with asyncio.timeout(30):  # half of what an engine gets that is only slow
            answers = await asyncio.gather(*(ask(pair.client, pair.url, one) for one in asked))
        took_s = time.monotonic() - began_s
    assert [(answer.status, answer.tokens) for answer in answers] == [(200, right) for right in expected]
    await pair.at_rest()
    figure(
        f"decode hangs: {len(asked)} requests that were sent to it are answered right after {took_s:.1f} s"
    )


async def test_a_blocked_side_channel_is_told_and_traffic_is_answered_all_the_same(
    pair: RealService, rng: random.Random, figure: Figure
) -> None:
    """A decode engine that starts anew has to ask for its peers' memory there."""
    prefill, decode = await pair.engine(P), await pair.engine(D)
    restarts = (await pair.instances())[decode].status.restarts
    with blocked(await side_channel(pair, prefill)):
        await pair.signal(decode, signal.SIGKILL)
        await pair.until(lambda: _serves_again(pair, decode, restarts), limit_s=START_S)
        began_s = time.monotonic()
        await pair.until(lambda: _verified(pair, "False", "HandshakeFailed"), limit_s=30)
        told_s = time.monotonic() - began_s
        asked = some(rng)
        began_s = time.monotonic()
        answer = await ask(pair.client, pair.url, asked)
        took_s = time.monotonic() - began_s
        assert (answer.status, answer.local) == (200, "no_kv_transfer")
        assert answer.tokens == await right(pair, asked, await pair.engine(D))
    began_s = time.monotonic()
    await pair.until(lambda: _verified(pair, "True", "Verified"))
    again_s = time.monotonic() - began_s
    figure(f"side channel blocked: KVTransferVerified False, HandshakeFailed, after {told_s:.1f} s")
    figure(f"  a request meanwhile: {took_s:.2f} s, {answer.local}; unblocked, True after {again_s:.1f} s")


@contextmanager
def blocked(port: int) -> Iterator[None]:
    """Nobody of this machine gets through to the port; needs root."""
    rule = ("INPUT", "-i", "lo", "-p", "tcp", "--dport", str(port), "-j", "REJECT")

    def change(how: str) -> None:
        subprocess.run(("iptables", "-w", how, *rule), check=True, capture_output=True)

    try:
        change("-I")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no firewall rule can be set here")
    try:
        yield
    finally:
        change("-D")


async def side_channel(pair: RealService, name: str) -> int:
    """Where the engine tells peers about its memory."""
    said = Path(f"/proc/{await pair.leader(name)}/environ").read_text(encoding="utf-8")
    return int(re.findall(r"VLLM_NIXL_SIDE_CHANNEL_PORT=(\d+)", said)[0])


async def _serves_again(pair: RealService, name: str, restarts: int) -> bool:
    instance = (await pair.instances())[name]
    return instance.status.restarts > restarts and instance.status.phase is Phase.SERVING


async def _verified(pair: RealService, status: str, reason: str) -> bool:
    found = (await pair.store.get(PDService, "chat", namespace=NAMESPACE)).status.conditions
    return any((one.type, one.status, one.reason) == ("KVTransferVerified", status, reason) for one in found)


async def test_an_engine_that_shuts_down_says_healthy_and_gets_nothing_that_it_would_abort(
    pair: RealService, rng: random.Random
) -> None:
    """Draining, vLLM's health is 200; new prompts get 500, in ids 200 with `abort` and no token."""
    prefill, decode = await pair.engine(P), await pair.engine(D)
    url = await pair.engine_url(decode)
    long = asyncio.create_task(ask(pair.client, pair.url, replace(LONG, tokens=1500)))
    await pair.until(lambda: _above(pair, decode, "vllm:num_requests_running", 0))
    leader = await pair.leader(decode)
    os.kill(leader, signal.SIGTERM)  # by somebody else: nobody has told the router
    asked = [some(rng) if n % 3 == 2 else of_ids(ids(rng, 250), stream=n % 3 == 1) for n in range(8)]
    first, health = await asyncio.gather(
        ask(pair.client, pair.url, asked[0]), pair.client.get(f"{url}/health")
    )
    assert health.status_code == 200
    answers = [first, *[await ask(pair.client, pair.url, one) for one in asked[1:]]]
    expected = [await right(pair, one, prefill) for one in asked]
    assert [(answer.status, answer.tokens) for answer in answers] == [(200, right) for right in expected]
    try:
        whole = await long
        assert len(whole.tokens) == 1500
    except (Broken, httpx.RemoteProtocolError):
        pytest.fail("a stream that ran was not let end")
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)  # its end takes a while; it starts anew while others are tested
