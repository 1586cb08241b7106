"""KV transfers between engine servers over loopback: correct, wrong with status 200, and recomputed."""

import asyncio
import time

from tests.integration.simulator.servers import (
    BLOCK_TOKENS,
    BLOCKS,
    Client,
    Server,
    Start,
    expected_text,
    fill_cache,
    prompt_of,
)


class TestKvTransfer:
    async def test_decode_continues_the_prompt_that_was_prefilled_elsewhere(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        prompt = prompt_of("transferred")
        before = await client.metric(d, "vllm:nixl_bytes_transferred_sum")
        kv_transfer_params = await client.prefill(p, prompt)
        assert kv_transfer_params.pop("remote_prefill_cached_tokens") == 0
        response = await client.complete(d, prompt, 8, kv_transfer_params=kv_transfer_params)
        assert response["choices"][0]["text"] == expected_text(prompt, 8)
        assert response["usage"] == {
            "prompt_tokens": 100,
            "total_tokens": 108,
            "completion_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 100},
        }
        moved = await client.metric(d, "vllm:nixl_bytes_transferred_sum") - before
        assert moved == 7 * BLOCK_TOKENS * 16384
        await client.wait_until_idle(p)
        await client.wait_until_idle(d)

    async def test_the_kv_transfer_parameters_have_the_fields_of_vllm(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, _ = pair
        kv_transfer_params = await client.prefill(p, prompt_of("fields"))
        request_id = kv_transfer_params["remote_request_id"]
        assert request_id.startswith("cmpl-")
        assert kv_transfer_params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[*kv_transfer_params["remote_block_ids"][0]]],
            "remote_engine_id": (await client.stats(p))["engine_id"],
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": p.side_channel_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 100,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }
        assert len(kv_transfer_params["remote_block_ids"][0]) == 7
        await client.inject_fault(p, "expire_leases")
        await client.wait_until_idle(p)

    async def test_with_remote_prefill_cached_tokens_usage_reports_the_cache_of_the_prefill_instance(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        prompt = prompt_of("key left in")
        kv_transfer_params = await client.prefill(p, prompt)
        response = await client.complete(d, prompt, 2, kv_transfer_params=kv_transfer_params)
        assert response["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert response["choices"][0]["text"] == expected_text(prompt, 2)

    async def test_another_prompt_of_the_same_length_continues_what_was_prefilled(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        prefilled, requested = prompt_of("sent to p"), prompt_of("sent to d")
        kv_transfer_params = await client.prefill(p, prefilled)
        assert await client.text(d, requested, 6, kv_transfer_params=kv_transfer_params) == expected_text(
            prefilled, 6
        )

    async def test_wrong_block_ids_give_wrong_text_with_status_200(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        prompt, other = prompt_of("right blocks"), prompt_of("other blocks")
        kv_transfer_params, wrong = await client.prefill(p, prompt), await client.prefill(p, other)
        mixed = kv_transfer_params | {"remote_block_ids": wrong["remote_block_ids"]}
        assert await client.text(d, prompt, 6, kv_transfer_params=mixed) == expected_text(other, 6)
        await client.inject_fault(p, "expire_leases")

    async def test_a_prompt_whose_blocks_do_not_exist_is_recomputed(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        prompt = prompt_of("no such blocks")
        kv_transfer_params = await client.prefill(p, prompt)
        kv_transfer_params["remote_block_ids"] = [[BLOCKS + i for i in range(7)]]
        assert await client.text(d, prompt, 6, kv_transfer_params=kv_transfer_params) == expected_text(
            prompt, 6
        )
        await client.inject_fault(p, "expire_leases")

    async def test_an_expired_lease_is_harmless_until_the_blocks_are_reused(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        expired = await client.metric(p, "vllm:nixl_num_kv_expired_reqs_total")
        late = await client.metric(p, "vllm:nixl_num_notifications_after_expiry_total")
        failed = await client.metric(d, "vllm:nixl_num_failed_transfers_total")
        lucky, unlucky = prompt_of("expired only"), prompt_of("expired, reused")
        kv_transfer_params = await client.prefill(p, lucky)
        await client.inject_fault(p, "expire_leases")
        assert await client.text(d, lucky, 6, kv_transfer_params=kv_transfer_params) == expected_text(
            lucky, 6
        )
        kv_transfer_params = await client.prefill(p, unlucky)
        await client.inject_fault(p, "expire_leases")
        await fill_cache(client, p, "other prompts")
        text = await client.text(d, unlucky, 6, kv_transfer_params=kv_transfer_params)
        assert text != expected_text(unlucky, 6)
        assert await client.metric(p, "vllm:nixl_num_kv_expired_reqs_total") == expired + 2
        assert await client.metric(p, "vllm:nixl_num_notifications_after_expiry_total") == late + 2
        assert await client.metric(d, "vllm:nixl_num_failed_transfers_total") == failed

    async def test_a_lease_expires_without_any_request(self, client: Client, start: Start) -> None:
        p = start("--lease-s", "0.2")
        await client.prefill(p, prompt_of("left behind"))
        await client.wait_until_idle(p)
        assert await client.metric(p, "vllm:nixl_num_kv_expired_reqs_total") == 1

    async def test_roles_swap_without_any_request_to_the_engines(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        a, b = pair
        for number, (p, d) in enumerate([(a, b), (b, a), (a, b)]):
            prompt = prompt_of(f"swap {number}")
            kv_transfer_params = await client.prefill(p, prompt)
            assert await client.text(d, prompt, 4, kv_transfer_params=kv_transfer_params) == expected_text(
                prompt, 4
            )

    async def test_a_killed_prefill_instance_costs_a_recompute(self, client: Client, start: Start) -> None:
        p, d = start(), start()
        warm, cold = prompt_of("warm the pair"), prompt_of("too late")
        await client.text(d, warm, 2, kv_transfer_params=await client.prefill(p, warm))
        kv_transfer_params = await client.prefill(p, cold)
        p.kill()
        assert await client.text(d, cold, 6, kv_transfer_params=kv_transfer_params) == expected_text(cold, 6)
        assert await client.metric(d, "vllm:nixl_num_failed_transfers_total") == 1

    async def test_an_unreachable_new_source_costs_five_seconds_and_delays_only_other_first_contacts(
        self, client: Client, start: Start
    ) -> None:
        dead, warm, new, d = start(), start(), start(), start()
        names = ("dead", "warm up", "warm", "new")
        prompts = {name: prompt_of(f"first contact: {name}") for name in names}
        prefill_instances = dict(zip(names, (dead, warm, warm, new), strict=True))
        kv_transfer_params_by_name = {
            name: await client.prefill(prefill_instances[name], prompts[name]) for name in names
        }
        dead.kill()
        start_s = time.monotonic()

        async def measure_s(name: str) -> float:
            kv_transfer_params = kv_transfer_params_by_name[name]
            del kv_transfer_params["remote_prefill_cached_tokens"]
            response = await client.complete(d, prompts[name], 4, kv_transfer_params=kv_transfer_params)
            assert response["choices"][0]["text"] == expected_text(prompts[name], 4)
            cached = response["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (0 if name == "dead" else 100)
            return time.monotonic() - start_s

        await measure_s("warm up")
        start_s = time.monotonic()
        dead_s, new_s, warm_s = await asyncio.gather(measure_s("dead"), measure_s("new"), measure_s("warm"))
        assert warm_s < 4.9 < min(dead_s, new_s)
        assert await client.metric(d, "vllm:nixl_num_failed_transfers_total") == 1

    async def test_prompts_of_a_restarted_prefill_instance_are_recomputed(
        self, client: Client, start: Start
    ) -> None:
        first, d = start(), start()
        warm, stale = prompt_of("before the restart"), prompt_of("prefilled before")
        await client.text(d, warm, 2, kv_transfer_params=await client.prefill(first, warm))
        kv_transfer_params = await client.prefill(first, stale)
        first.kill()
        start("--side-channel-port", str(first.side_channel_port))
        assert await client.text(d, stale, 4, kv_transfer_params=kv_transfer_params) == expected_text(
            stale, 4
        )
        assert await client.metric(d, "vllm:nixl_num_failed_transfers_total") == 1
