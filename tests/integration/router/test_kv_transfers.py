"""What hand-offs leave behind: their proof in the usage, and text that is right however late they are."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from fulcrum_core.profiles import load_profile
from fulcrum_router.policy import PairKey
from tests.integration.router.fake_engines import (
    Answering,
    FakeEngine,
    Script,
    World,
    event_chunk,
    quick_settings,
    routed,
    running,
    until,
)
from tests.integration.simulator.servers import (
    BLOCK,
    BLOCKS,
    DEADLINE_S,
    MODEL,
    Client,
    answer_to,
    fill_cache,
    launch,
    prompt_of,
    ready,
)
from tests.integration.simulator.servers import Server as Engine

PROMPT = {"model": "m", "prompt": "once upon a time", "max_tokens": 3}
CHUNKS = [
    event_chunk(json.dumps({"choices": [{"text": word}], "usage": None}, separators=(",", ":")))
    for word in ("a ", 'a "usage":{"prompt_tokens":9} \\"choices\\":[] ', "c ")
]
DONE = event_chunk("[DONE]")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(DEADLINE_S)
    ) as session:
        yield session


def usage_of(cached: int | None, *, details: bool = True) -> dict[str, Any]:
    """The usage of a 100-token prompt."""
    told = {"cached_tokens": cached} if cached is not None else None
    return {"prompt_tokens": 100, "total_tokens": 103, **({"prompt_tokens_details": told} if details else {})}


def usage_event(usage: dict[str, Any]) -> str:
    return json.dumps({"id": "x", "choices": [], "usage": usage}, separators=(",", ":"))


def words_then(usage: dict[str, Any] | None, *, glued: bool = False, pieces: int | None = None) -> Script:
    """Three words and, if asked for, the usage: as a chunk of its own, or in one with `[DONE]`."""

    async def script(answering: Answering) -> None:
        body = answering.asked.body
        if not body.get("stream"):
            answer = {"choices": [{"text": "a b c "}], **({"usage": usage} if usage else {})}
            return await answering.json(200, answer)
        await answering.start_stream()
        wanted = usage and (body.get("stream_options") or {}).get("include_usage")
        end = DONE
        if wanted and usage is not None:
            told = usage_event(usage)
            end = event_chunk(f"{told}\n\ndata: [DONE]") if glued else event_chunk(told) + DONE
        framed = b"".join((*CHUNKS, end, b"0\r\n\r\n"))
        for start in range(0, len(framed), pieces or len(framed)):
            await answering.raw(framed[start : start + (pieces or len(framed))])
            await asyncio.sleep(0)

    return script


async def raw_answer(client: aiohttp.ClientSession, world: World, **fields: Any) -> bytes:
    async with client.post(world.url(), json={**PROMPT, **fields}) as answer:
        assert answer.status == 200
        return await answer.read()


def counts(world: World, prefill: str = "p1", decode: str = "d1") -> tuple[int, int, int, str]:
    """Proven, recomputed, unknown, and the last finding."""
    pair = world.router.pairs[PairKey(prefill, decode)]
    return (*pair.counts.values(), pair.reason)  # type: ignore[return-value]


def plain(*events: str) -> bytes:
    return b"".join(f"data: {event}\n\n".encode() for event in events)


WORDS = b"".join(chunk.partition(b"\r\n")[2][:-2] for chunk in CHUNKS)


@pytest.mark.parametrize("glued", [False, True], ids=["own chunk", "one chunk with the end"])
@pytest.mark.parametrize("pieces", [None, 7, 61], ids=["one read", "reads of 7", "reads of 61"])
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {"include_usage": False, "continuous_usage_stats": True}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
    ids=["nothing asked", "null", "usage not wanted", "usage asked for"],
)
async def test_a_stream_is_proven_and_shows_the_usage_only_to_who_asked(
    client: aiohttp.ClientSession, options: dict[str, Any], *, seen: bool, glued: bool, pieces: int | None
) -> None:
    usage = usage_of(100)
    decode = FakeEngine("d1", decode=words_then(usage, glued=glued, pieces=pieces))
    async with running(FakeEngine("p1"), decode) as world:
        got = await raw_answer(client, world, stream=True, **options)
        end = plain(usage_event(usage), "[DONE]") if seen else plain("[DONE]")
        assert got == WORDS + end
        assert counts(world) == (1, 0, 0, "Proven")
        assert world["d1"].decodes[0]["stream_options"] == {"include_usage": True}
        assert world.router.books.output_tokens == len(CHUNKS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (usage_of(100), (1, 0, 0)),
        (usage_of(96), (1, 0, 0)),
        (usage_of(95), (0, 1, 0)),
        (usage_of(0), (0, 1, 0)),
        (usage_of(None), (0, 0, 1)),
        (usage_of(None, details=False), (0, 0, 1)),
        (None, (0, 0, 1)),
    ],
    ids=["all", "whole blocks", "less", "none", "details null", "no details", "no usage"],
)
async def test_a_hand_off_is_counted_by_what_decode_did_not_compute(
    client: aiohttp.ClientSession, *, stream: bool, usage: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1", decode=words_then(usage))) as world:
        await raw_answer(client, world, stream=stream)
        assert counts(world)[:3] == expected


async def test_an_engine_that_leaves_a_zero_out_is_understood_once_it_told_more(
    client: aiohttp.ClientSession,
) -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1", decode=words_then(usage_of(100)))) as world:
        await raw_answer(client, world)
        world["d1"].decode = words_then(usage_of(None))
        await raw_answer(client, world)
        assert counts(world)[:3] == (1, 1, 0)


async def test_a_prompt_of_one_token_proves_nothing(client: aiohttp.ClientSession) -> None:
    """Its only token is the last one, which is always computed."""
    usage = {**usage_of(0), "prompt_tokens": 1}
    async with running(FakeEngine("p1"), FakeEngine("d1", decode=words_then(usage))) as world:
        await raw_answer(client, world)
        assert counts(world) == (0, 0, 0, "NoTrafficYet")


async def test_nothing_is_asked_of_decode_where_nothing_is_handed_over(client: aiohttp.ClientSession) -> None:
    async with running(FakeEngine("d1")) as world:
        await raw_answer(client, world, stream=True)
        assert world["d1"].decodes == [{**PROMPT, "stream": True}]
        assert not world.router.pairs.pairs


# --- the lease ---------------------------------------------------------------------------------------------


def expired(count: int) -> bytes:
    return b'vllm:nixl_num_kv_expired_reqs_total{engine="0"} %d.0\n' % count


def late(after: asyncio.Event, then: Script) -> Script:
    """Holds a hand-off back until told; what is recomputed comes at once."""

    async def script(answering: Answering) -> None:
        if "kv_transfer_params" in answering.asked.body:
            await after.wait()
        await then(answering)

    return script


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("before", "after", "sound"),
    [
        (expired(2), expired(2), True),
        (expired(2), expired(3), False),
        (expired(2), b"", False),
        (b"", b"", False),
    ],
    ids=["nothing expired", "something expired", "not told any more", "never told"],
)
async def test_what_comes_after_the_lease_is_passed_on_only_if_nothing_expired(
    client: aiohttp.ClientSession, *, stream: bool, before: bytes, after: bytes, sound: bool
) -> None:
    go = asyncio.Event()
    prefill = FakeEngine("p1", metrics=before)
    decode = FakeEngine("d1", decode=late(go, words_then(usage_of(100))))
    settings = quick_settings(first_byte=DEADLINE_S)
    async with running(prefill, decode, settings=settings) as world:
        world.router.fleet["p1"].kv_lease_s = 1.5
        if before:
            await until(lambda: world.router.fleet["p1"].kv_expired == 2, "its metrics are read")
        asking = asyncio.ensure_future(raw_answer(client, world, stream=stream))
        await until(lambda: bool(world["d1"].decodes), "the decode leg waits")
        prefill.metrics = after
        await asyncio.sleep(0.6)  # an answer in time comes before half a second
        go.set()
        got = await asking
        assert got.endswith(plain("[DONE]")) if stream else b"a b c" in got
        handed = ["kv_transfer_params" in body for body in world["d1"].decodes]
        local = dict(world.router.books.local)
        assert (handed, local) == (([True], {}) if sound else ([True, False], {"lease_expired": 1}))
        assert not world.router.fleet["d1"].health.failures
        assert world.ledgers_are_empty()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("sound", [True, False], ids=["nothing expired", "something expired"])
async def test_what_decode_says_while_a_hand_off_there_is_overdue_may_come_of_what_that_has_fetched(
    client: aiohttp.ClientSession, *, stream: bool, sound: bool
) -> None:
    """Its wrong blocks are in decode's prefix cache before its own answer tells.

    The third request is sent before that is found out, and answered afterwards.
    """
    go = {"first": asyncio.Event(), "third": asyncio.Event()}
    says = words_then(usage_of(100))

    async def script(answering: Answering) -> None:
        body = answering.asked.body
        if "kv_transfer_params" in body and body["prompt"] in go:
            await go[body["prompt"]].wait()
        await says(answering)

    prefill = FakeEngine("p1", metrics=expired(2))
    settings = quick_settings(first_byte=DEADLINE_S)
    async with running(prefill, FakeEngine("d1", decode=script), settings=settings) as world:
        decode = world.router.fleet["d1"]
        world.router.fleet["p1"].kv_lease_s = 1.5
        await until(lambda: world.router.fleet["p1"].kv_expired == 2, "its metrics are read")
        first = asyncio.ensure_future(raw_answer(client, world, prompt="first"))
        await until(lambda: len(world["d1"].decodes) == 1, "the decode leg waits")
        await asyncio.sleep(0.6)  # an answer in time comes before half a second
        third = asyncio.ensure_future(raw_answer(client, world, prompt="third"))
        await until(lambda: len(world["d1"].decodes) == 2, "another one waits")
        prefill.metrics = expired(2 if sound else 3)
        got = await raw_answer(client, world, stream=stream)
        assert got.endswith(plain("[DONE]")) if stream else b"a b c" in got
        go["third"].set()
        assert b"a b c" in await third
        go["first"].set()
        assert b"a b c" in await first
        sent = [
            (body["prompt"], "kv_transfer_params" in body, body.get("cache_salt"))
            for body in world["d1"].decodes
        ]
        handed = [("first", True, None), ("third", True, None), (PROMPT["prompt"], True, None)]
        again = [(name, False) for name in (PROMPT["prompt"], "third", "first")]
        assert (sent[:3], [asked[:2] for asked in sent[3:]]) == (handed, [] if sound else again)
        assert len({asked[2] for asked in sent}) == (1 if sound else 4)  # each has a salt of its own
        assert dict(world.router.books.local) == ({} if sound else {"lease_expired": 3})
        assert (world.router.books.caches_left, decode.health.failures) == (0 if sound else 1, 0)
        assert world.ledgers_are_empty()


async def test_what_is_computed_again_is_in_doubt_no_more_whatever_others_fetched_too_late(
    client: aiohttp.ClientSession,
) -> None:
    async def script(answering: Answering) -> None:
        decode = world.router.fleet["d1"]
        world.router.distrust(decode, decode.salt)  # as the failure of somebody else's leg does, each time
        await words_then(usage_of(100))(answering)

    async with running(FakeEngine("p1"), FakeEngine("d1", decode=script)) as world:
        assert b"a b c" in await raw_answer(client, world)
        salts = [asked.get("cache_salt", "") for asked in world["d1"].decodes]
        assert (len(set(salts)), dict(world.router.books.local)) == (2, {"lease_expired": 1})
        assert not world.router.fleet["d1"].health.failures
        assert world.ledgers_are_empty()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Two engine servers with few blocks and a lease of a second."""
    profile = load_profile("laptop").model_dump() | {
        **{"name": "quick", "t0": 0.002, "d1": 1e-5, "b": 1.25e-4, "weight_bytes": 100_000_000},
        **{"block_size": BLOCK, "kv_capacity_tokens": BLOCK * BLOCKS, "handshake_s": 0.01, "startup_s": 0.0},
    }
    path: Path = tmp_path_factory.mktemp("profile") / "quick.yaml"
    path.write_text(yaml.safe_dump(profile))
    made = [ready(process) for process in [launch(path, "--lease-s", "1.0") for _ in range(2)]]
    yield made[0], made[1]
    for engine in made:
        engine.kill()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
async def test_a_decode_leg_held_back_past_the_lease_gets_no_other_prompts_text(
    client: aiohttp.ClientSession, engines: tuple[Engine, Engine], *, stream: bool, guarded: bool
) -> None:
    """The engine answers 200 with another prompt's text: without the guard it reaches the client."""
    p, d = engines
    calls = Client(client)
    async with routed({"p1": p, "d1": d}, first_byte=10.0, prefill=10.0) as (router, url):
        router.fleet["p1"].kv_lease_s = 1.0 if guarded else 3600.0
        prompt = prompt_of(f"held back {stream} {guarded}")
        await until(lambda: router.fleet["p1"].kv_expired is not None, "its metrics are read")
        await calls.fault(d, "hang")
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": stream}
        asking = asyncio.ensure_future(client.post(url, json=body))
        held = router.fleet["d1"].ledger
        await until(lambda: held.decode_requests == 1, "the decode leg waits")
        await asyncio.sleep(1.1)  # the lease itself
        await fill_cache(calls, p, f"other {stream} {guarded}")
        await calls.fault(d, "none")
        async with await asking as answer:
            content = await answer.read()
        right = answer_to(prompt, 8)
        text = _text(content, stream=stream)
        assert (answer.status, text == right) == (200, guarded)
        assert router.books.local.get("lease_expired", 0) == guarded


def _text(content: bytes, *, stream: bool) -> str:
    if not stream:
        return str(json.loads(content)["choices"][0]["text"])
    events = [line[6:] for line in content.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)
