"""Faults of real engines: each client gets the right tokens or a clear error.

Each test names the fault and begins with idle engines.
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
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Phase
from tests.conftest import RecordMeasurement
from tests.engines.completions import (
    BrokenStreamError,
    CompletionRequest,
    CompletionResponse,
    compute_reference_tokens,
    generate_prompts,
    send,
)
from tests.engines.in_process_router import build_token_request, generate_token_ids
from tests.engines.services import DEADLINE_S, NAMESPACE, START_S, D, P, VllmService
from tests.engines.test_flips import format_ms, measure_flip_to_token_s

pytestmark = pytest.mark.timeout(900)

LONG_STREAM = CompletionRequest("count the clocks", 3000, stream=True)
"""Keeps the decode engine busy for seconds."""
GENERATED = "vllm:generation_tokens_total"


def build_unseen_request(rng: random.Random, tokens: int = 12) -> CompletionRequest:
    """Return a request with a prompt of a few blocks that no cache holds."""
    return CompletionRequest(generate_prompts(rng, 1, (80, 90))[0], tokens)


async def compute_expected(pair: VllmService, request: CompletionRequest, name: str) -> tuple[int, ...]:
    """Return the tokens of this engine without KV transfer."""
    return await compute_reference_tokens(pair.client, await pair.engine_url(name), request)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"do_remote_prefill": True}, id="incomplete"),
        pytest.param({"do_remote_decode": True, "do_remote_prefill": False}, id="like the router's own"),
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
        pytest.param("nonsense", id="text instead of an object"),
    ],
)
async def test_kv_transfer_parameters_of_a_client_reach_no_engine(
    pair: VllmService, rng: random.Random, params: object
) -> None:
    """Incomplete parameters crash a real engine; others make it connect anywhere, or keep KV for nobody.

    The router replaces them by its own; a request with several prompts gets none.
    """
    leaders = [await pair.find_leader_pid(await pair.find_instance(role)) for role in (P, D)]
    request = build_unseen_request(rng)
    expected = await compute_expected(pair, request, await pair.find_instance(D))
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        if isinstance(params, dict):
            params = {**params, "remote_port": elsewhere.getsockname()[1]}
        for prompt in (request.prompt, [request.prompt, "another"]):
            extra = {"prompt": prompt, "kv_transfer_params": params}
            response = await send(pair.client, pair.url, replace(request, extra=extra))
            assert (response.status, response.tokens) == (200, expected)
            assert json.loads(response.text).get("kv_transfer_params") is None
        with pytest.raises(BlockingIOError):  # no engine has connected
            elsewhere.accept()
    assert [await pair.find_leader_pid(await pair.find_instance(role)) for role in (P, D)] == leaders


async def test_disconnected_client_leaves_no_kv_on_either_engine(
    short_lease: VllmService, rng: random.Random
) -> None:
    """In mid-stream, and between the legs: there the prefill engine keeps the KV until the lease expires."""
    decode, prefill = await short_lease.find_instance(D), await short_lease.find_instance(P)
    generated = await short_lease.read_metric(decode, GENERATED)
    cancelled_request = asyncio.create_task(
        send(short_lease.client, short_lease.url, replace(LONG_STREAM, tokens=1500))
    )
    await short_lease.wait_until(lambda: _metric_exceeds(short_lease, decode, "vllm:num_requests_running", 0))
    cancelled_request.cancel()
    await asyncio.gather(cancelled_request, return_exceptions=True)
    await short_lease.wait_until(lambda: _engine_is_idle(short_lease, decode))
    async with short_lease.pause_engine(decode):
        cancelled_request = asyncio.create_task(
            send(short_lease.client, short_lease.url, replace(build_unseen_request(rng), tokens=1500))
        )
        await short_lease.wait_until(lambda: _has_decode_requests(short_lease, decode))
        cancelled_request.cancel()
        await asyncio.gather(cancelled_request, return_exceptions=True)
    await short_lease.wait_until(lambda: _engine_is_idle(short_lease, decode))
    await short_lease.wait_until(lambda: _engine_is_idle(short_lease, prefill))
    assert await short_lease.read_metric(decode, GENERATED) - generated < 1500


async def _metric_exceeds(pair: VllmService, name: str, metric: str, value: float) -> bool:
    return await pair.read_metric(name, metric) > value


async def _engine_is_idle(pair: VllmService, name: str) -> bool:
    running = await pair.read_metric(name, "vllm:num_requests_running")
    return running == 0 and await pair.read_metric(name, "vllm:kv_cache_usage_perc") == 0


async def _has_decode_requests(pair: VllmService, name: str, legs: int = 1) -> bool:
    return (await pair.read_instance_state(name)).decode_legs >= legs


async def test_requests_survive_a_prefill_engine_killed_between_prefill_and_decode_leg(
    pair: VllmService, rng: random.Random, record_measurement: RecordMeasurement
) -> None:
    """One prompt's KV is in the killed engine, a second is being computed; the old handshake is not used."""
    prefill, decode = await pair.find_instance(P), await pair.find_instance(D)
    requests = build_unseen_request(rng), build_unseen_request(rng)
    expected = [await compute_expected(pair, one, decode) for one in requests]
    async with pair.suspend_process(decode):
        transferred = asyncio.create_task(send(pair.client, pair.url, requests[0]))
        await pair.wait_until(lambda: _has_decode_requests(pair, decode))
        async with pair.suspend_process(prefill):
            computed = asyncio.create_task(send(pair.client, pair.url, requests[1]))
            await pair.wait_until(lambda: _has_prefill_tokens(pair, prefill))
            await pair.signal_engine(prefill, signal.SIGKILL)
    began_s = time.monotonic()
    responses = [await transferred, await computed]
    took_s = time.monotonic() - began_s
    assert [(response.status, response.tokens) for response in responses] == [
        (200, tokens) for tokens in expected
    ]
    assert await count_right_responses(pair, rng, decode) == 10
    before = await pair.read_state()
    await pair.wait_until_idle()
    back_s = time.monotonic() - began_s
    await pair.wait_until(lambda: _all_pairs_verified_since(pair, before))
    record_measurement(
        f"prefill killed between the legs: right responses after {took_s:.2f} s, back after {back_s:.0f} s"
    )


async def _has_prefill_tokens(pair: VllmService, name: str) -> bool:
    return (await pair.read_instance_state(name)).prefill_tokens > 0


async def _all_pairs_verified_since(pair: VllmService, before: RouterState) -> bool:
    """Whether canaries have verified both directions since `before`."""
    verified = {(seen.prefill, seen.decode): seen.verified for seen in before.pairs}
    now = (await pair.read_state()).pairs
    return len(now) == 2 and all(seen.verified > verified[seen.prefill, seen.decode] for seen in now)


async def count_right_responses(pair: VllmService, rng: random.Random, decode: str) -> int:
    """Send ten requests; return the number of right responses."""
    requests = [build_unseen_request(rng) for _ in range(10)]
    responses = await asyncio.gather(*(send(pair.client, pair.url, one) for one in requests))
    expected = [await compute_expected(pair, one, decode) for one in requests]
    return sum(
        response.status == 200 and response.tokens == tokens
        for response, tokens in zip(responses, expected, strict=True)
    )


async def test_streams_of_a_killed_decode_engine_continue_on_another_or_end_in_an_error(
    pair: VllmService, rng: random.Random, record_measurement: RecordMeasurement
) -> None:
    prefill = await pair.find_instance(P)
    request = build_unseen_request(rng)
    # With a prompt of ids the rest begins at the same tokens; a text might be divided into others.
    sound = replace(LONG_STREAM, tokens=1500, extra={"prompt": [rng.randint(10, 500) for _ in range(80)]})
    unsound = replace(LONG_STREAM, extra={"presence_penalty": 0.1})
    expected = [await compute_expected(pair, one, prefill) for one in (request, sound)]

    await send(pair.client, pair.url, replace(unsound, tokens=8))  # the first penalty takes an engine seconds
    begun = [asyncio.Event(), asyncio.Event()]
    streams = [
        asyncio.create_task(send(pair.client, pair.url, one, begun=event))
        for one, event in zip((unsound, sound), begun, strict=True)
    ]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(event.wait() for event in begun))
    state = await pair.read_state()
    [decode] = [seen.name for seen in state.instances if seen.decode_legs == len(streams)]
    [prefill] = [name for name in await pair.list_instances() if name != decode]
    async with pair.suspend_process(decode):
        waiting = asyncio.create_task(send(pair.client, pair.url, request))
        await pair.wait_until(lambda: _has_decode_requests(pair, decode, 3))
        await pair.signal_engine(decode, signal.SIGKILL)
    response = await waiting
    assert (response.status, response.tokens, response.decode) == (200, expected[0], prefill)
    broken, continued = await asyncio.gather(*streams, return_exceptions=True)
    assert isinstance(continued, CompletionResponse)
    assert continued.tokens == expected[1]
    assert isinstance(broken, BrokenStreamError)
    error = json.loads(str(broken))["error"]
    assert (error["type"], error["code"]) == ("upstream_error", 502)
    await pair.wait_until_idle()
    waits_s = [await measure_flip_to_token_s(pair, rng) for _ in range(2)]  # one for each direction
    record_measurement(
        f"flip right after a restart, decision to first correct token: {format_ms(waits_s)} ms"
    )


async def test_hung_engine_is_ejected_and_serves_again_when_it_responds(
    pair: VllmService, rng: random.Random, record_measurement: RecordMeasurement
) -> None:
    prefill, decode = await pair.find_instance(P), await pair.find_instance(D)
    requests = [build_unseen_request(rng) for _ in range(6)]
    expected = [await compute_expected(pair, one, prefill) for one in requests]
    async with pair.suspend_process(decode):
        began_s = time.monotonic()
        async with asyncio.timeout(30):  # half the time-out of an engine that is only slow
            responses = await asyncio.gather(*(send(pair.client, pair.url, one) for one in requests))
        took_s = time.monotonic() - began_s
    assert [(response.status, response.tokens) for response in responses] == [
        (200, tokens) for tokens in expected
    ]
    await pair.wait_until_idle()
    record_measurement(
        f"decode hangs: {len(requests)} requests sent to it got right responses after {took_s:.1f} s"
    )


async def test_blocked_side_channel_sets_handshake_failed_and_requests_still_get_right_tokens(
    pair: VllmService, rng: random.Random, record_measurement: RecordMeasurement
) -> None:
    """A restarted decode engine must ask for its peers' memory on this port."""
    prefill, decode = await pair.find_instance(P), await pair.find_instance(D)
    restarts = (await pair.list_instances())[decode].status.restarts
    with block_port(await read_side_channel_port(pair, prefill)):
        await pair.signal_engine(decode, signal.SIGKILL)
        await pair.wait_until(lambda: _has_restarted(pair, decode, restarts), limit_s=START_S)
        began_s = time.monotonic()
        await pair.wait_until(lambda: _has_transfer_condition(pair, "False", "HandshakeFailed"), limit_s=30)
        reported_after_s = time.monotonic() - began_s
        request = build_unseen_request(rng)
        began_s = time.monotonic()
        response = await send(pair.client, pair.url, request)
        took_s = time.monotonic() - began_s
        assert (response.status, response.local_prefill_reason) == (200, "kv_transfer_broken")
        assert response.tokens == await compute_expected(pair, request, await pair.find_instance(D))
    began_s = time.monotonic()
    await pair.wait_until(lambda: _has_transfer_condition(pair, "True", "Verified"))
    again_s = time.monotonic() - began_s
    record_measurement(
        f"side channel blocked: KVTransferVerified False, HandshakeFailed, after {reported_after_s:.1f} s"
    )
    record_measurement(
        f"  a request meanwhile: {took_s:.2f} s, {response.local_prefill_reason}; unblocked, True after "
        f"{again_s:.1f} s"
    )


@contextmanager
def block_port(port: int) -> Iterator[None]:
    """Reject local connections to the port while the block runs; needs root."""
    rule = ("INPUT", "-i", "lo", "-p", "tcp", "--dport", str(port), "-j", "REJECT")

    def change_rule(action: str) -> None:
        subprocess.run(("iptables", "-w", action, *rule), check=True, capture_output=True)

    try:
        change_rule("-I")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("cannot set a firewall rule (needs root and iptables)")
    try:
        yield
    finally:
        change_rule("-D")


async def read_side_channel_port(pair: VllmService, name: str) -> int:
    """Return the port on which other engines ask for this engine's memory."""
    environment = Path(f"/proc/{await pair.find_leader_pid(name)}/environ").read_text(encoding="utf-8")
    return int(re.findall(r"VLLM_NIXL_SIDE_CHANNEL_PORT=(\d+)", environment)[0])


async def _has_restarted(pair: VllmService, name: str, restarts: int) -> bool:
    instance = (await pair.list_instances())[name]
    return instance.status.restarts > restarts and instance.status.phase is Phase.SERVING


async def _has_transfer_condition(pair: VllmService, status: str, reason: str) -> bool:
    found = (await pair.store.get(PDService, "chat", namespace=NAMESPACE)).status.conditions
    return any((one.type, one.status, one.reason) == ("KVTransferVerified", status, reason) for one in found)


async def test_engine_shutting_down_reports_healthy_and_no_request_gets_an_aborted_response(
    pair: VllmService, rng: random.Random
) -> None:
    """While vLLM drains, /health is 200; text prompts get 500, token prompts 200 with finish_reason abort."""
    prefill, decode = await pair.find_instance(P), await pair.find_instance(D)
    url = await pair.engine_url(decode)
    long = asyncio.create_task(send(pair.client, pair.url, replace(LONG_STREAM, tokens=1500)))
    await pair.wait_until(lambda: _metric_exceeds(pair, decode, "vllm:num_requests_running", 0))
    leader = await pair.find_leader_pid(decode)
    os.kill(leader, signal.SIGTERM)  # not by the operator: the router is not informed
    requests = [
        build_unseen_request(rng)
        if n % 3 == 2
        else build_token_request(generate_token_ids(rng, 250), stream=n % 3 == 1)
        for n in range(8)
    ]
    first, health = await asyncio.gather(
        send(pair.client, pair.url, requests[0]), pair.client.get(f"{url}/health")
    )
    assert health.status_code == 200
    responses = [first, *[await send(pair.client, pair.url, one) for one in requests[1:]]]
    expected = [await compute_expected(pair, one, prefill) for one in requests]
    assert [(response.status, response.tokens) for response in responses] == [
        (200, tokens) for tokens in expected
    ]
    try:
        whole = await long
        assert len(whole.tokens) == 1500
    except (BrokenStreamError, httpx.RemoteProtocolError):
        pytest.fail("a running stream was cut off")
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)  # draining takes long; the restart overlaps with the next tests
