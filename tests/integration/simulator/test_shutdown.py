"""How engine servers and their requests end: engine death, disconnected clients, shutdown."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.simulator.servers import (
    MODEL,
    PREFILL_ONLY,
    Client,
    Server,
    Start,
    expected_text,
    prompt_of,
    wait_for_exit,
)
from tests.waiting import wait_until


class TestDeath:
    async def test_malformed_kv_transfer_parameters_end_the_process_with_exit_code_0(
        self, client: Client, start: Start
    ) -> None:
        server = start()
        body = {"model": MODEL, "prompt": "x" * 400, "kv_transfer_params": {"do_remote_prefill": True}}
        status, response = await client.post(server, "/v1/completions", body)
        assert (status, response["error"]["type"]) == (500, "InternalServerError")
        assert await client.health(server) == 503
        assert await wait_for_exit(server) == 0

    async def test_fewer_blocks_than_the_prompt_needs_kill_the_engine(
        self, client: Client, start: Start
    ) -> None:
        p, d = start(), start()
        kv_transfer_params = await client.prefill(p, prompt_of("short", 96))
        body = {"model": MODEL, "prompt": prompt_of("short", 97), "kv_transfer_params": kv_transfer_params}
        assert (await client.post(d, "/v1/completions", body))[0] == 500
        assert await wait_for_exit(d) == 0

    async def test_parameters_without_a_request_id_hang_until_the_client_disconnects_which_kills_the_engine(
        self, client: Client, start: Start
    ) -> None:
        p, d = start(), start()
        prompt = prompt_of("no id")
        kv_transfer_params = await client.prefill(p, prompt)
        del kv_transfer_params["remote_request_id"]
        hanging = asyncio.ensure_future(client.text(d, prompt, 4, kv_transfer_params=kv_transfer_params))

        async def is_waiting() -> bool:
            return bool((await client.stats(d))["waiting"] == 1)

        await wait_until(is_waiting)
        assert await client.text(d, "another request", 2) == expected_text("another request", 2)
        assert not hanging.done()
        hanging.cancel()
        assert await wait_for_exit(d) == 0

    async def test_an_open_stream_gets_an_error_event_when_the_engine_dies(
        self, client: Client, start: Start
    ) -> None:
        server = start()
        long = asyncio.ensure_future(
            client.stream(server, "/v1/completions", {"prompt": "a long one", "max_tokens": 900})
        )

        await wait_until(lambda: client.has_one_running(server))
        body = {"model": MODEL, "prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}
        await client.post(server, "/v1/completions", body)
        events = await long
        assert json.loads(events[-2])["error"]["code"] == 500
        assert events[-1] == "[DONE]"

    async def test_a_server_dies_with_its_parent(self, profile_file: Path) -> None:
        program = (
            "import subprocess, sys\n"
            "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
            "print(child.pid, child.stdout.readline(), flush=True)\n"
        )
        command = [sys.executable, "-m", "fulcrum_simulator.server", "--name", "a", "--model", MODEL]
        parent = subprocess.run(
            [sys.executable, "-c", program, *command, "--profile", str(profile_file)],
            capture_output=True,
            text=True,
            check=True,
        )
        child = int(parent.stdout.split()[0])

        async def has_ended() -> bool:
            try:
                return " Z " in Path(f"/proc/{child}/stat").read_text()
            except OSError:
                return True

        await wait_until(has_ended)


class TestClientDisconnects:
    async def test_a_stream_whose_client_disconnected_frees_its_blocks(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        server, _ = pair
        aborted = await client.metric(server, "vllm:request_success_total", 'finished_reason="abort"')
        body = {"prompt": "a very long output", "max_tokens": 900}
        stream = asyncio.ensure_future(client.stream(server, "/v1/completions", body))

        await wait_until(lambda: client.has_one_running(server))
        stream.cancel()
        await client.wait_until_idle(server)
        now = await client.metric(server, "vllm:request_success_total", 'finished_reason="abort"')
        assert now == aborted + 1

    async def test_an_abandoned_kv_transfer_frees_the_blocks_of_the_prefill_instance(
        self, client: Client, start: Start
    ) -> None:
        p, d = start(), start("--lease-s", "30")
        prompt = prompt_of("left in the middle")
        kv_transfer_params = await client.prefill(p, prompt)
        await client.inject_fault(d, "hang")
        pulling = asyncio.ensure_future(client.text(d, prompt, 500, kv_transfer_params=kv_transfer_params))
        await client.inject_fault(d, "none")

        async def has_begun() -> bool:
            stats = await client.stats(d)
            return bool(stats["running"] or stats["waiting"])

        await wait_until(has_begun)
        pulling.cancel()
        await client.wait_until_idle(d)
        await client.wait_until_idle(p)
        assert await client.metric(p, "vllm:nixl_num_kv_expired_reqs_total") == 0


class TestShutdown:
    async def test_draining_finishes_running_requests_and_aborts_new_ones(
        self, client: Client, start: Start
    ) -> None:
        server = start("--shutdown-timeout", "10")
        long = asyncio.ensure_future(client.text(server, "finish this", 400))

        await wait_until(lambda: client.has_one_running(server))
        server.process.send_signal(signal.SIGTERM)

        async def refuses_requests() -> bool:
            response = await client.complete(server, "refused", 4)
            return bool(response["choices"][0]["finish_reason"] == "abort")

        await wait_until(refuses_requests)
        refused = await client.complete(server, "refused", 4, kv_transfer_params=PREFILL_ONLY)
        assert refused["choices"][0]["text"] == ""
        assert refused["kv_transfer_params"] is None
        assert await client.health(server) == 200
        assert await long == expected_text("finish this", 400)
        assert await wait_for_exit(server) == 0

    async def test_blocks_stay_readable_while_draining(self, client: Client, start: Start) -> None:
        p, d = start("--shutdown-timeout", "10"), start()
        prompt = prompt_of("read while draining")
        kv_transfer_params = await client.prefill(p, prompt)
        p.process.send_signal(signal.SIGTERM)
        assert await client.text(d, prompt, 4, kv_transfer_params=kv_transfer_params) == expected_text(
            prompt, 4
        )
        assert await wait_for_exit(p) == 0
        assert await client.metric(d, "vllm:nixl_num_failed_transfers_total") == 0

    async def test_without_a_timeout_running_requests_are_aborted_and_the_process_exits(
        self, client: Client, start: Start
    ) -> None:
        server = start()
        long = asyncio.ensure_future(client.complete(server, "cut short", 900))

        async def is_running() -> bool:
            return await client.metric(server, "vllm:generation_tokens_total") > 5

        await wait_until(is_running)
        server.process.send_signal(signal.SIGTERM)
        response = await long
        choice = response["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert expected_text("cut short", 900).startswith(choice["text"])
        assert await wait_for_exit(server) == 0

    async def test_a_hanging_request_does_not_prevent_shutdown(self, client: Client, start: Start) -> None:
        p, d = start(), start()
        prompt = prompt_of("hangs at the end")
        kv_transfer_params = await client.prefill(p, prompt)
        del kv_transfer_params["remote_request_id"]
        body = {"model": MODEL, "prompt": prompt, "kv_transfer_params": kv_transfer_params}
        hanging = asyncio.ensure_future(client.post(d, "/v1/completions", body))

        async def is_waiting() -> bool:
            return bool((await client.stats(d))["waiting"] == 1)

        await wait_until(is_waiting)
        d.process.send_signal(signal.SIGTERM)
        assert (await hanging)[0] == 500
        assert await wait_for_exit(d) == 0

    async def test_a_drain_that_times_out_sends_no_response_and_ends_when_the_client_disconnects(
        self, client: Client, start: Start
    ) -> None:
        server = start("--shutdown-timeout", "0.2")
        long = asyncio.ensure_future(client.complete(server, "never finished", 1000))

        await wait_until(lambda: client.has_one_running(server))
        server.process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([long], timeout=0.6)
        assert not done
        assert server.process.poll() is None
        long.cancel()
        assert await wait_for_exit(server) == 0
