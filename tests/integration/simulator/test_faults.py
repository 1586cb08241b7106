"""Faults injected into an engine server at run time."""

import asyncio
import json
import time
from typing import Any

import pytest

from tests.integration.simulator.servers import (
    MODEL,
    Client,
    Server,
    Start,
    expected_text,
    prompt_of,
    wait_for_exit,
)


class TestFaults:
    async def test_die_ends_the_process_at_once(self, client: Client, start: Start) -> None:
        server = start()
        await client.inject_fault(server, "die")
        assert await wait_for_exit(server) == 1

    async def test_hang_blocks_all_responses_until_the_fault_is_cleared(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        server, _ = pair
        await client.inject_fault(server, "hang")
        calls = [
            asyncio.ensure_future(client.health(server)),
            asyncio.ensure_future(client.text(server, "waits", 2)),
        ]
        done, _ = await asyncio.wait(calls, timeout=0.3)
        assert not done
        await client.inject_fault(server, "none")
        assert await asyncio.gather(*calls) == [200, expected_text("waits", 2)]

    async def test_slow_multiplies_the_duration_of_every_step(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        server, _ = pair
        await client.post(server, "/simulator/fault", {"kind": "slow", "factor": 10})
        start_s = time.monotonic()
        await client.text(server, "timed", 20)
        took_s = time.monotonic() - start_s
        await client.inject_fault(server, "none")
        assert took_s > 20 * 0.02  # without the fault a step takes a tenth of that

    async def test_refuse_responds_503_and_stays_healthy(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        server, _ = pair
        await client.inject_fault(server, "refuse")
        status, response = await client.post(server, "/v1/completions", {"model": MODEL, "prompt": "no"})
        assert (status, response["error"]["code"], await client.health(server)) == (503, 503, 200)
        await client.inject_fault(server, "none")
        assert await client.text(server, "yes", 2) == expected_text("yes", 2)

    async def test_abort_draining_responds_like_an_engine_after_sigterm(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        server, _ = pair
        await client.inject_fault(server, "abort_draining")
        response = await client.complete(server, "no", 4)
        events = await client.stream(server, "/v1/chat/completions", {"messages": [{"content": "no"}]})
        await client.inject_fault(server, "none")
        assert (response["choices"][0]["text"], response["choices"][0]["finish_reason"]) == ("", "abort")
        assert [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]] == [None, "abort"]

    async def test_fail_transfers_fails_exactly_count_pulls(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        await client.inject_fault(d, "fail_transfers", count=2)
        cached = []
        for number in range(3):
            prompt = prompt_of(f"failing {number}")
            kv_transfer_params = await client.prefill(p, prompt)
            del kv_transfer_params["remote_prefill_cached_tokens"]
            response = await client.complete(d, prompt, 2, kv_transfer_params=kv_transfer_params)
            assert response["choices"][0]["text"] == expected_text(prompt, 2)
            cached.append(response["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 100]
        await client.inject_fault(p, "expire_leases")

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"kind": "melt"}, "fault.kind (melt) is not one of die, hang, slow, refuse"),
            ({"kind": "slow"}, "fault.factor (None) is not a number above 0"),
            ({"kind": "slow", "factor": -1}, "fault.factor (-1) is not a number above 0"),
            ({"kind": "fail_transfers", "count": 0}, "fault.count (0) is not a whole number"),
            ({"kind": "hang", "for_s": 3}, "fault.for_s (3) is not a field of fault hang"),
        ],
    )
    async def test_an_invalid_fault_is_refused_in_one_line(
        self, client: Client, pair: tuple[Server, Server], body: dict[str, Any], message: str
    ) -> None:
        status, response = await client.post(pair[0], "/simulator/fault", body)
        assert status == 400
        assert response["error"]["message"].startswith(message)
